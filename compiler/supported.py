"""What fp4 runs on: PyTorch from MINIMUM, CPUs and CUDA GPUs. Anything else is refused before a graph is touched."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

MINIMUM = (2, 11)  # where the pass hook, its cache key and grouped_mm on a CPU are all there
DEVICES = ("cpu", "cuda")


class UnsupportedError(RuntimeError):
    """A version of PyTorch or a device that fp4 does not run on; the message says what to install or where to move."""


def check_torch(version: str = torch.__version__) -> None:
    """Raise UnsupportedError for a PyTorch older than MINIMUM."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < MINIMUM:
        oldest = ".".join(map(str, MINIMUM))
        raise UnsupportedError(
            f"fp4 needs PyTorch {oldest} or later, and this is {version}; write: pip install 'torch>={oldest}'"
        )


def check_devices(inputs: Iterable[Any]) -> None:
    """Raise UnsupportedError where a graph input is on a device without a lowering."""
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.device.type not in DEVICES:
            raise UnsupportedError(
                f"backend fp4 runs on {' and '.join(DEVICES)}, and a tensor of shape {tuple(value.shape)} "
                f"is on {value.device}; "
                "write model.to('cpu') or model.to('cuda'), or compile this model with another backend"
            )
