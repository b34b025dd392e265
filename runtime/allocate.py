"""Tensors that are made anew at every call of a small step, which waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes an uninitialized tensor, by Inductor's own allocation where there is one: half of ``torch.empty``'s time."""
    plain = partial(torch.empty, shape, dtype=dtype, device=device)
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if allocate is None:
        return plain
    quick = partial(allocate, shape, torch.empty(shape, device="meta").stride(), dtype)
    if device.type != "cuda":
        return quick
    current, index = torch._C._cuda_getDevice, device.index  # of which it allocates
    return lambda: quick() if current() == index else plain()
