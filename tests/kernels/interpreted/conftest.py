"""These tests run under Triton's interpreter, which is chosen before Triton is imported: `make interpreted`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """One thread, and no warnings from numpy, which runs the kernels: they divide by zero and select afterwards."""
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True, scope="session")
def _patched_once() -> Iterator[None]:
    """The interpreter patches triton.language at every call of a helper; a launch has, so once for a module is enough."""
    from triton.runtime.interpreter import InterpretedFunction

    usual, seen = InterpretedFunction.__call__, set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__globals__["__name__"]
        if module in seen:
            return self.rewrite()(*args, **kwargs)
        seen.add(module)
        return usual(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield
