"""These tests run under Triton's interpreter, which is chosen before Triton is imported: `make interpreted`."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
