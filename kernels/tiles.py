"""How large a tile a program takes: rows, units and warps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.packed import CODES, PackedSpec
from fp4.kernels.target import INTERPRETER, Target
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4


@dataclass(frozen=True)
class Tile:
    """rows x units (KernelSpec.unit columns each), powers of two, by `warps` warps; a program takes `turns` of them.

    registers: the most that a thread may have, where fewer than the assembler takes are faster; 0 for as many as it takes.
    """

    rows: int
    units: int
    warps: int = 4
    turns: int = 4
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Triton's, of the compilation."""
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})

    def constants(self, whole: bool) -> dict[str, int]:
        """What a kernel is compiled for. whole: does no tile reach beyond the operand?"""
        return {"TR": self.rows, "TB": self.units, "WHOLE": whole}


NARROWEST = 16  # units: 512 bytes of a row
LOST = 1 / 64  # share of the tiles' columns that may lie outside the operand


def fitted(spec: KernelSpec, target: Target, units: int) -> Tile:
    """The usual tile for an operand of so many units a row: flatter where too much of the row's last tile would be empty."""
    tile, least = tile_of(spec, target), spec.least_tile[1]
    if spec.memory == "columns" or target.name == INTERPRETER:
        return tile
    while tile.units >= 2 * max(least, NARROWEST) and -units % tile.units > LOST * units:
        tile = replace(tile, rows=2 * tile.rows, units=tile.units // 2)
    return tile


def tile_of(spec: KernelSpec, target: Target) -> Tile:
    """The usual tile of a kernel."""
    least_rows, least_units = spec.least_tile
    if target.name == INTERPRETER:
        return Tile(max(least_rows, 64), max(least_units, 16), 1)
    if isinstance(spec, PackedSpec) and spec.memory == "columns":
        return _of_words(spec, target)
    rows, units, warps, turns = _measured(spec, target.rounds_e2m1)
    registers = 72 if _capped(spec, target) else 0
    tile = Tile(max(rows, least_rows), max(units, least_units), warps, turns, registers)
    while tile.rows * tile.units > rows * units and tile.rows * tile.units * spec.unit > 64 * 32 * tile.warps:
        tile = replace(tile, warps=2 * tile.warps)  # at most 64 elements a thread, what its registers hold
    return tile


def _capped(spec: KernelSpec, target: Target) -> bool:
    """Is it faster with fewer registers? Other kernels of four_six would have a stack."""
    if not isinstance(spec.quantizer, NVFP4) or isinstance(spec, PackedSpec) or target.name != "sm_90":
        return False
    plain = spec.memory == "rows" and spec.block[0] == 1 and spec.rotation is None and spec.input == "bf16"
    return spec.quantizer.four_six and plain


def _of_words(spec: PackedSpec, target: Target) -> Tile:
    """A thread holds 64 elements; where many units are rotated together, one warp holds them, 32 a thread if quantized (and on
    Blackwell, whose assembler would give a thread a stack)."""
    least_rows, least_units = spec.least_tile
    units, warps = max(least_units, 4), 1 if least_units > 4 else 4
    held = 32 if warps == 1 and (spec.quantizer is not None or target.rounds_e2m1) else 64
    rows = max(least_rows, CODES, held * 32 * warps // (units * spec.unit))
    while rows * units * spec.unit > 64 * 32 * warps:
        warps *= 2
    return Tile(rows, units, warps, 1 if warps > 1 else 4)


def _measured(spec: KernelSpec, blackwell: bool) -> tuple[int, int, int, int]:
    """Rows, units, warps and turns that were the fastest of some dozen on an H200 (benchmarks/gpu_kernels.py).

    blackwell: others, not measured, where its assembler would give a thread a stack.
    """
    q, packed = spec.quantizer, spec.output == "packed"
    four_six = isinstance(q, NVFP4) and q.four_six
    heavy = (isinstance(q, NVFP4) and q.rounding == "ms_eden") or (four_six and packed)
    few = spec.output == "rotated" or (isinstance(q, MXFP4 | MXFP8) and not packed)  # instructions
    if spec.draws_elements and not spec.aligned:
        return (4, 32 if spec.block[0] == 1 else 8, 4, 1) if spec.memory == "rows" else (32, 4, 4, 1)
    if spec.memory == "rows":
        if spec.block[0] > 1:
            if four_six or spec.block[0] == 128:
                return (16, 16, 4, 1) if four_six else (16, 8, 4, 1)
            return (16, 8, 4, 4 if packed else 2) if spec.block[0] == 16 else (16, 16, 8, 4)
        if spec.output == "amax":
            return (1, 64, 1, 8) if spec.rotation_units > 1 else (8, 64, 4, 8)
        if heavy and not four_six:
            return 1, 64, 1, 12
        if four_six:
            return 1, 64, 2, 12
        if packed:
            nearest_h16 = spec.rotation is not None and spec.rotation_units == 1 and q is not None and q.rounding == "nearest"
            return 1, 128 if nearest_h16 else 64, 2, 4
        if spec.output == "values":
            return (1, 128, 2, 4) if spec.dtype == "bf16" else (4, 32, 4, 4)
        if spec.rotation_units > 1 or (isinstance(q, NVFP4) and q.rounding == "stochastic"):
            return 1, 64, 2, 4
        return 4, 32, 4, 1 if few else 2
    if spec.scale_layout == "swizzled" and q is not None and (q.needs_seed or spec.rotation_units > 1):
        return (16 if q.outer else 32), 8, 2, 4  # of a Blackwell
    if spec.output == "amax":
        return (32, 8, 1, 4) if spec.rotation_units > 1 else (64, 8, 4, 4)
    if spec.rotation_units > 1:
        return 8 if heavy and (packed or blackwell) else 16, 8, 1, 8 if heavy else 4
    if four_six:
        return 8, 8, 1, 8
    if packed and blackwell and spec.rotation is not None:
        return 16, 8, 1, 4
    return (64, 8, 4, 2) if packed else (64, 4, 2, 1 if few else 2)
