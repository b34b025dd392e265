"""One kernel for an operand that is quantized along its rows and along its columns, as X and dY are in a training step.

A program takes a square tile of x and does both kernels' work on it. Each loads the tile as it would alone, but the second
finds it in the cache: memory is read once. Bytes and draws are those of the two kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4.kernels.build import Bound, Tiles, build
from fp4.kernels.codegen import Kernel
from fp4.kernels.helpers import HELPERS, used
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.launch import SITES, Plan, planned
from fp4.kernels.quantize import Run, draws
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile
from fp4.kernels.writer import CONSTANTS
from fp4.runtime.layout import ceil_div
from fp4.runtime.spec import NVFP4, Quantizer, Rotation, SpecError

UNIT = 16
PARTS = ("rows", "columns")
ELEMENTS = 4096  # of a tile; twice as many where a thread has the registers for it


@dataclass(frozen=True)
class BothSpec:
    """rows: the kernel of the operand (R, C), which lies row by row in memory. columns: that of its transpose (C, R)."""

    rows: KernelSpec
    columns: KernelSpec

    def __post_init__(self) -> None:
        for name, spec in zip(PARTS, (self.rows, self.columns), strict=True):
            if spec.memory != name or spec.output not in ("packed", "decoded") or spec.unit != UNIT or spec.posthoc:
                raise SpecError(
                    f"{name}: {spec.quantizer}, output={spec.output!r}, memory={spec.memory!r}; write memory={name!r}, packed "
                    "or decoded output of blocks of at least 16 columns, without posthoc"
                )
        if self.rows.input != self.columns.input:
            raise SpecError(f"input={self.rows.input!r} and {self.columns.input!r}: both read the same matrix")
        if math.prod(_least(self)) * UNIT > ELEMENTS:
            raise SpecError(
                f"{self.rows.quantizer} after {self.rows.rotation} and {self.columns.quantizer} after {self.columns.rotation} "
                f"want a tile of more than {ELEMENTS} elements; quantize each orientation alone"
            )


class _Part(Kernel):
    """The lines of one orientation as functions of the tile."""

    loops, held, ahead = False, 1, True
    loaded: list[str]  # names of what `load` returns

    def load_ahead(self, names: list[str]) -> None:
        """What is loaded comes from the kernel, which loads for both orientations before it computes."""
        self.loaded = names
        self.loading = [*self.lines, *self.loads(names), f"return {', '.join(names)}"]

    def written(self, name: str) -> str:
        """Functions: `{name}_start` of what is the same for all tiles, `{name}_load` and `{name}_tile` of one tile."""
        self.body()
        start = [*self.before, f"return {', '.join(self.constant)}"]
        given = ["down", "across", *self.constant, *(p for p in self.parameters() if p not in self.constant), *CONSTANTS]
        functions = (
            _function(f"{name}_start", [*self.parameters(), *CONSTANTS], start),
            _function(f"{name}_load", given, self.loading),
            _function(f"{name}_tile", [*self.loaded, *given], [*self.lines, *self.after]),
        )
        return "\n\n\n".join(functions)

    def calls(self, name: str) -> tuple[str, str, str]:
        """Lines of the kernel that call them."""
        place = "down, across" if name == "rows" else "across, down"
        size = "TR, TB, WHOLE" if name == "rows" else f"TB * {UNIT}, TR // {UNIT}, WHOLE"
        arguments = self.arguments(name)
        constant = ", ".join(f"{name}_{value}" for value in self.constant)
        given = ", ".join([place, constant, *(value for p, value in arguments.items() if p not in self.constant), size])
        loaded = ", ".join(f"{name}_{part}" for part in self.loaded)
        return (
            f"    {constant} = {name}_start({', '.join(arguments.values())}, {size})",
            f"        {loaded} = {name}_load({given})",
            f"        {name}_tile({loaded}, {given})",
        )

    @property
    def constant(self) -> list[str]:
        """What the lines before the loop assign."""
        assigned = [line.strip().partition(" = ") for line in self.before if not line.startswith(("#", "tl.store"))]
        return list(dict.fromkeys(name for left, equals, _ in assigned if equals for name in left.split(", ")))

    def parameters(self) -> list[str]:
        return [*self.pointers, *self.scalars]

    def arguments(self, name: str) -> dict[str, str]:
        """Parameter -> what the kernel passes for it."""
        swapped = {"rows": "columns", "columns": "rows", "stride_r": "stride_c", "stride_c": "stride_r"}
        shared = {"x_ptr": "x_ptr"} | ({n: n for n in swapped} if name == "rows" else swapped)
        return {p: shared.get(p, f"{name}_{p}") for p in self.parameters()}


def _function(name: str, parameters: list[str], lines: list[str]) -> str:
    body = "\n".join(f"    {line}" if line.strip() else "" for line in lines)
    return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{body}"


def source(spec: BothSpec, target: Target) -> str:
    """The text of the module whose function `kernel` is the kernel."""
    parts = {name: _Part(part, target) for name, part in zip(PARTS, (spec.rows, spec.columns), strict=True)}
    functions = [part.written(name) for name, part in parts.items()]
    starts, loads, tiles = zip(*(part.calls(name) for name, part in parts.items()), strict=True)
    # Both load before either computes, where a thread has the registers: draws take many.
    drawn = spec.rows.draws_elements or spec.columns.draws_elements
    steps = [line for pair in zip(loads, tiles, strict=True) for line in pair] if drawn else [*loads, *tiles]
    own = list(dict.fromkeys(v for name, part in parts.items() for v in part.arguments(name).values()))
    own.sort(key=lambda name: not name.endswith("_ptr"))
    helpers = [HELPERS[name] for name in used(list(dict.fromkeys(h for part in parts.values() for h in part.helpers)))]
    sites = [name for name in own if name.endswith("site")]
    kernel_name = "_and_".join(part.name() for part in parts.values())
    steps += [f"        {line}" for line in parts["rows"].advance()]
    lines = "\n".join([*starts, "    for tile in range(tl.program_id(0), total, tl.num_programs(0)):", *steps])
    kernel = f"""
@triton.jit(do_not_specialize={sites!r})
def {kernel_name}({", ".join([*own, *CONSTANTS])}):
    tiles = tl.maximum(tl.cdiv(columns, TB * {UNIT}), 1)  # of a row; as wide as a rotation: its padding takes none more
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    down, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    down_step, across_step = tl.num_programs(0) // tiles, tl.num_programs(0) % tiles
{lines}
        down, across = next_down, next_across
""".strip("\n")
    titles = [part.title().partition(".\n")[0] for part in parts.values()]
    title = f'"""{titles[0]}; and of the transpose\n{titles[1]}.\n\nA program takes TR rows x TB units of {UNIT} columns.\n"""'
    head = f"{title}\n\nimport triton\nimport triton.language as tl"
    return "\n\n\n".join([head, *helpers, *functions, kernel, f"kernel = {kernel_name}"]) + "\n"


def tile_of(spec: BothSpec) -> Tile:
    """As square as rotations and blocks allow; 64 elements a thread, or 32 or 16 where more would not stay in its registers."""
    rows, units = _least(spec)
    crowded = _crowded(spec.rows) + _crowded(spec.columns)
    elements = ELEMENTS if crowded else 2 * ELEMENTS
    while rows * units * UNIT < elements:
        rows, units = (2 * rows, units) if rows < UNIT * units else (rows, 2 * units)
    return Tile(rows, units, elements // (64 * 32) << crowded, 2)


def _least(spec: BothSpec) -> tuple[int, int]:
    (rows, units), (transposed_rows, transposed_units) = spec.rows.least_tile, spec.columns.least_tile
    return max(rows, UNIT * transposed_units), max(units, transposed_rows // UNIT)


def _crowded(spec: KernelSpec) -> bool:
    q = spec.quantizer
    return spec.rotation_units > 1 or (isinstance(q, NVFP4) and (q.four_six or q.rounding == "ms_eden"))


@dataclass(frozen=True)
class Side:
    """How one orientation is quantized: arguments of ``quantize.quantize``, or, with a dtype, of ``fake_quantize``."""

    q: Quantizer
    dtype: torch.dtype | None = None
    scaled: bool = False
    amax: Tensor | None = None
    rotation: Rotation | None = None
    seed: Tensor | None = None
    site: int = 0
    signs_site: int | None = None
    swizzled: bool = False


def quantize(x: Tensor, rows: Side, columns: Side) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What ``quantize`` (or ``fake_quantize``, for a side with a dtype) of x, and of its transpose, return, in one read of x.

    x: (R, C) on a CUDA device, each row's elements together in memory; else ValueError. Raises SpecError for a quantizer of
    blocks below 16 columns, or with posthoc.
    """
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"x of shape {tuple(x.shape)} and strides {x.stride()}; pass a matrix whose rows are contiguous")
    for q in (rows.q, columns.q):
        if isinstance(q, NVFP4) and q.posthoc:
            raise SpecError(f"{q}: its scales are made by a second pass; quantize each orientation alone")
    given: list[Tensor] = [x]
    sites: list[int] = []
    results, plans = [], []
    for operand, side in ((x, rows), (x.t(), columns)):
        about, signs_site = (side.q, side.rotation, draws(side.seed)), side.site if side.signs_site is None else side.signs_site
        method, how = ("packed", (side.swizzled,)) if side.dtype is None else ("decoded", (side.dtype, side.scaled))
        plan = planned(Run, method, (operand,), about, how)
        read = plan.read((operand,), side.amax, side.seed, signs_site)
        outputs = [make() for make in plan.makers]
        given += [*read[1:], *outputs]
        sites += [side.site, signs_site]
        plans.append(plan)
        results.append(tuple(outputs))
    planned(_Both, "bound", (x,), tuple(plans))(given, tuple(sites))
    return results[0], results[1]


class _Both:
    """The kernel of two plans, of an operand and of its transpose."""

    def __init__(self, tensors: Sequence[Tensor], rows: Plan, columns: Plan) -> None:
        (self.x,), self.plans = tensors, (rows, columns)

    def bound(self) -> Bound:
        x, named = self.x, list(zip(self.plans, PARTS, strict=True))
        spec = BothSpec(*(_oriented(plan.spec, memory) for plan, memory in named))
        tile = tile_of(spec)
        names = ["x_ptr", *(f"{part}_{name}" for plan, part in named for name in plan.names[1:])]
        sites = [f"{part}_{name}" for part in PARTS for name in SITES]
        seen = {f"{part}_{name}": dtype for plan, part in named for name, dtype in plan.seen.items()}
        whole = x.numel() > 0 and x.shape[0] % tile.rows == 0 and x.shape[1] % (tile.units * UNIT) == 0
        numbers = {"rows": x.shape[0], "columns": x.shape[1], "stride_r": x.stride(0), "stride_c": 1, **tile.constants(whole)}
        tiles = max(1, ceil_div(x.shape[1], tile.units * UNIT)) * max(1, ceil_div(x.shape[0], tile.rows))

        kernel = _kernel(spec, self.plans[0].target)
        return Bound(kernel, Tiles(tiles, tile.turns), x.device, names, sites, numbers, seen, **tile.options)


def _oriented(spec: KernelSpec, memory: str) -> KernelSpec:
    """The specification as if its operand lay so: that of a single row or column could be either."""
    return dataclasses.replace(spec, memory=memory)


@cache
def _kernel(spec: BothSpec, target: Target) -> Any:
    return build(source(spec, target))
