"""From source text to a Triton kernel: a file in a cache folder, imported; and its launches."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4.runtime.files import write_whole
from fp4.runtime.layout import Size

# No product and sum contracted into one rounding, and no denormal flushed by the device library's ceil and floor.
COMPILE_OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
KINDS = 1024  # of arguments that a kernel keeps


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


class Bound:
    """A Triton kernel, and what it was compiled to for each kind of arguments.

    Triton looks its arguments over at every call: integers that are 1 or a multiple of 16, pointers that are aligned. Here
    equal integers and equal alignments find the compiled kernel at once. options: of the compilation.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel = kernel
        self.options = {**options, **COMPILE_OPTIONS}
        self.names: list[str] = kernel.arg_names
        self.plain = [name for name in self.names if not name.endswith("site")]  # those that Triton specializes for
        self.compiled: dict[Any, Any] = {}

    def __call__(self, grid: tuple[Size, ...], device: torch.device, arguments: Mapping[str, Any]) -> Any:
        """Launch on the device's current stream; returns the compiled kernel."""
        grid = (*grid, 1, 1)[:3]
        same = device.type != "cuda" or device.index == torch.cuda.current_device()
        with nullcontext() if same else torch.cuda.device(device):
            key = (device.index, *(v.data_ptr() & 15 if isinstance(v := arguments[n], Tensor) else v for n in self.plain))
            found = self.compiled.get(key)
            if found is None:
                found = self.kernel[grid](**{name: arguments[name] for name in self.names}, **self.options)
                if found is not None:  # the interpreter compiles nothing
                    if len(self.compiled) == KINDS:
                        self.compiled.clear()
                    self.compiled[key] = found
            else:
                found[grid](*[arguments[name] for name in self.names])
        return found
