"""Counts that ops keep on the device while a graph runs, by the name of what is counted; read when somebody asks.

One tensor a device, made before any CUDA graph is captured, so a replayed graph counts on.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS = 16384

_tensors: dict[torch.device, Tensor] = {}
_slots: dict[str, int] = {}


def reserve(device: torch.device) -> Tensor:
    """The device's counts: int64 (SLOTS, 2)."""
    if device not in _tensors:
        _tensors[device] = torch.zeros((SLOTS, 2), dtype=torch.int64, device=device)
    return _tensors[device]


def counter(name: str, device: torch.device) -> Tensor:
    """The two counts of `name`, a view that ops add to. Past SLOTS names, the last slot is shared."""
    slot = _slots.setdefault(name, min(len(_slots), SLOTS - 1))
    return reserve(device)[slot]


def count(name: str) -> tuple[int, int] | None:
    """The two counts of `name`, summed over devices, for which it waits; None where nothing counted under it."""
    if name not in _slots:
        return None
    first, second = zip(*(t[_slots[name]].tolist() for t in _tensors.values()), strict=True)
    return sum(first), sum(second)


def read() -> dict[str, tuple[int, int]]:
    """Name -> its counts, of all names."""
    return {name: found for name in _slots if (found := count(name)) is not None}


def clear() -> None:
    """Counts back to zero."""
    for tensor in _tensors.values():
        tensor.zero_()
