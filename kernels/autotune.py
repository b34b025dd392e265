"""The fastest tile of a kernel for a class of shapes, measured once a GPU and kept on disk. Off unless asked for.

Bits never depend on a tile, so this changes speed alone. ``FP4_AUTOTUNE=1``, or the backend's option `autotune`, switches it on
for the process; without it, in a captured CUDA graph, and under the interpreter, a kernel has its usual tile
(``tiles.fitted``), which depends on nothing but its specification and target.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from fp4.kernels.build import cache_folder
from fp4.kernels.codegen import source
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, tile_of
from fp4.runtime.files import write_whole

# Elements that a thread may hold: below, threads idle; above, registers spill.
FEWEST, MOST = 8, 128
WARPS = (1, 2, 4, 8)
Timer = Callable[[Tile], float]


_switch = {"on": False}


def switch_on() -> None:
    """For every kernel that this process launches from here on."""
    from fp4.kernels.launch import PLANS

    if not _switch["on"]:
        _switch["on"] = True
        PLANS.clear()  # they have their tiles


def enabled() -> bool:
    """Was autotuning asked for?"""
    return _switch["on"] or os.environ.get("FP4_AUTOTUNE", "0") not in ("", "0")


def folder() -> Path:
    """Where choices are kept: beside the kernels' sources."""
    return cache_folder().parent / "tiles"


def shape_class(rows: int, width: int) -> tuple[int, int]:
    """Shapes that share a choice: both sizes up to the next power of two."""
    return tuple(1 << max(0, size - 1).bit_length() for size in (rows, width))  # type: ignore[return-value]


def candidates(spec: KernelSpec, target: Target) -> list[Tile]:
    """The usual tile, first, and its neighbours: half and twice the rows and units, 1 to 8 warps, as many turns."""
    usual = tile_of(spec, target)
    least_rows, least_units = spec.least_tile
    found = {usual: None}
    for rows in (usual.rows // 2, usual.rows, usual.rows * 2):
        for units in (usual.units // 2, usual.units, usual.units * 2):
            for warps in WARPS:
                held = rows * units * spec.unit / (warps * 32)
                if rows >= least_rows and units >= least_units and FEWEST <= held <= MOST:
                    found[replace(usual, rows=rows, units=units, warps=warps)] = None
    return list(found)


def fastest(spec: KernelSpec, target: Target, gpu: str, rows: int, width: int, timer: Timer) -> Tile:
    """The fastest candidate for the class of (rows, width), from memory, from disk, or measured now.

    gpu: the device's name. timer: seconds that a tile takes; a tile for which it raises is left out. Equal times keep the one
    listed first. A choice that cannot be written is kept in memory alone.
    """
    entry = _entry(spec, target, gpu, shape_class(rows, width))
    if entry.tile is None:
        entry.tile = entry.read() or entry.measure(timer)
    return entry.tile


class _Choice:
    """One kernel on one GPU for one class of shapes."""

    def __init__(self, spec: KernelSpec, target: Target, gpu: str, shapes: tuple[int, int], triton: str) -> None:
        self.spec, self.target = spec, target
        self.tile: Tile | None = None
        self.key = {
            "gpu": gpu,
            "target": target.name,
            "spec": repr(spec),
            "source": hashlib.sha256(source(spec, target).encode()).hexdigest(),
            "shapes": list(shapes),
            "triton": triton,
        }
        name = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:32]
        self.path = folder() / f"{name}.json"

    def read(self) -> Tile | None:
        """What is on disk, if it is this choice and whole."""
        try:
            found = json.loads(self.path.read_text())
            tile = Tile(**found["tile"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return tile if found["key"] == self.key and tile in candidates(self.spec, self.target) else None

    def measure(self, timer: Timer) -> Tile:
        times: list[tuple[float, Tile]] = []
        for tile in candidates(self.spec, self.target):
            try:
                times.append((timer(tile), tile))
            except Exception:
                times.append((math.inf, tile))  # e.g. more shared memory than there is
        best = min(times, key=lambda timed: timed[0])
        tile = best[1] if best[0] < math.inf else tile_of(self.spec, self.target)
        self.write(tile, [{**asdict(t), "seconds": s} for s, t in times if s < math.inf])
        return tile

    def write(self, tile: Tile, times: list[dict[str, Any]]) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written costs the next process its measuring, no more
            write_whole(self.path, json.dumps({"key": self.key, "tile": asdict(tile), "times": times}, indent=1))


@cache
def _entry(spec: KernelSpec, target: Target, gpu: str, shapes: tuple[int, int]) -> _Choice:
    import triton

    return _Choice(spec, target, gpu, shapes, triton.__version__)


def forget() -> None:
    """Drop what is in memory; the disk stays."""
    _entry.cache_clear()
