"""From source text to a Triton kernel: a file in a cache folder, imported."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fp4.runtime.files import write_whole

# No product and sum contracted into one rounding, and no denormal flushed by the device library's ceil and floor.
COMPILE_OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


def require_triton() -> None:
    """Raises ImportError, saying what to install, where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError("fp4.kernels needs Triton, which is not installed; write: pip install 'triton>=3.6'")


def cache_folder() -> Path:
    """Where sources are kept: $FP4_CACHE_DIR, or ~/.cache/fp4."""
    return Path(os.environ.get("FP4_CACHE_DIR") or Path.home() / ".cache" / "fp4") / "kernels"


@cache
def build(text: str) -> Any:
    """The function `kernel` of a source, a ``triton.JITFunction``. One file and one import for equal texts.

    Triton reads a function's source from its file, so there must be one.
    """
    require_triton()
    name = f"fp4_kernel_{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    path = cache_folder() / f"{name}.py"
    if not path.exists():
        write_whole(path, text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.kernel
