"""How large a tile a program takes: rows, units and warps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.packed import PackedSpec
from fp4.kernels.target import INTERPRETER, Target
from fp4.runtime.spec import NVFP4


@dataclass(frozen=True)
class Tile:
    """rows x units (KernelSpec.unit columns each), powers of two, by `warps` warps; a program takes `turns` of them."""

    rows: int
    units: int
    warps: int = 4
    turns: int = 4


def tile_of(spec: KernelSpec, target: Target) -> Tile:
    """The usual tile of a kernel."""
    least_rows, least_units = spec.least_tile
    if target.name == INTERPRETER:
        return Tile(max(least_rows, 64), max(least_units, 16), 1)
    if isinstance(spec, PackedSpec) and spec.memory == "columns":
        # A thread holds 64 elements of one row, or 128 where little else is in registers.
        units = max(least_units, 4)
        held = 128 if spec.output == "amax" else 64
        rows = max(least_rows, 32, held * 128 // (units * spec.unit))
    elif spec.memory == "rows":
        # 512 columns, so that a warp's 32 loads of 16 bytes follow each other; two units a thread of four warps.
        units = max(least_units, 512 // spec.unit)
        rows = max(least_rows, 4096 // (units * spec.unit))
    elif least_units > 4:
        # A warp holds all the units that are rotated together.
        rows, units = max(least_rows, 32), max(least_units, 32)
    else:
        # Eight rows and one unit a thread: 128 bytes of each column are read together, 128 bytes of codes written.
        rows, units = max(least_rows, 64), max(least_units, 16)
    return _in_registers(spec, Tile(rows, units, 8 if rows * units * spec.unit > 16384 else 4))


def _most(spec: KernelSpec) -> int:
    """Elements that a thread holds at most: of more, some would go to local memory."""
    q = spec.quantizer
    if q is None or isinstance(spec, PackedSpec):
        return 128
    if isinstance(q, NVFP4) and q.four_six and q.block[0] > 1:
        return 32  # two roundings, and their errors, reduced over rows: all are held at once
    much = isinstance(q, NVFP4) and (q.four_six or q.outer or q.block[1] > 16)
    return 64 if q.needs_seed or spec.fp8_blocks or much else 128


def _in_registers(spec: KernelSpec, tile: Tile) -> Tile:
    """The tile, smaller where a thread would hold too much: fewer units, then fewer rows, then more warps."""
    least_rows, least_units = spec.least_tile
    while tile.rows * tile.units * spec.unit > _most(spec) * 32 * tile.warps:
        if tile.units > least_units:
            tile = replace(tile, units=tile.units // 2)
        elif tile.rows > max(least_rows, 32):
            tile = replace(tile, rows=tile.rows // 2)
        else:
            tile = replace(tile, warps=tile.warps * 2)
    return tile
