"""Which kernels a recipe needs on a target, compiled with no GPU and judged: the rows of ``fp4 kernels``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

import fp4
from fp4.kernels.compile import candidate
from fp4.kernels.fp8 import fp8_spec
from fp4.kernels.inspection import Candidate, Row, examine
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.masks import MaskedSpec, UnrotateSpec
from fp4.kernels.packed import PackedSpec, readable
from fp4.kernels.target import BLACKWELL, Target
from fp4.matmul_table import Shape, matmuls
from fp4.passes.fold_scales import foldable
from fp4.passes.lower_fp8 import FP8_ONLY
from fp4.passes.lower_fp8 import formats as fp8_formats
from fp4.passes.recipes import describe
from fp4.runtime.spec import Quantizer, Rotation

# The first and the second operand of each GEMM: does the contracted dimension lie along rows of memory, or along columns?
MEMORY = {"fprop": ("rows", "rows"), "dgrad": ("rows", "columns"), "wgrad": ("columns", "columns")}


def quantize_specs(recipes: Iterable[str], target: Target) -> list[KernelSpec]:
    """Every quantize kernel that the recipes' operands need, phases included, each once.

    An operand is packed where it is saved, decoded where it is not; where the target multiplies FP4, it is also packed with
    swizzled scales; elsewhere decoded values may come with the product of two tensor scales; where it multiplies FP8 alone,
    packed MXFP4 is made FP8. The tensor amax, after the rotation, is a kernel of its own. An operand that is fprop's, decoded,
    is read from fprop's codes; a clip mask is written with the codes, and applied as a gradient is rotated back. Raises
    PolicyError for an unknown recipe.
    """
    found: dict[KernelSpec, None] = {}
    for name in recipes:
        policy = describe(name).policy
        for precision in (policy.precision, *(phase.precision for _, phase in policy.phases)):
            fprop, saved = precision.fprop, dict[str, Quantizer | None]()
            if fprop is not None:
                saved = {"dgrad": fprop.second.quantizer, "wgrad": fprop.first.quantizer}
            for gemm, operands in precision.gemms().items():
                if operands is None:
                    continue
                pair = operands.first.quantizer, operands.second.quantizer
                if target.capability in FP8_ONLY:
                    found.update({fp8_spec(q, dtype): None for q, dtype in zip(pair, fp8_formats(*pair), strict=False) if q})
                for operand, memory in zip((operands.first, operands.second), MEMORY[gemm], strict=True):
                    if operand.quantizer is None:
                        continue
                    forward = saved.get(gemm) if operand.source == "forward" else None
                    read = {"memory": memory, "source": forward} if forward and readable(forward) else {"memory": memory}
                    found.update(dict.fromkeys(_operand_specs(operand.quantizer, operands.rotation, target, read)))
                    if operand.clip_gradient:
                        found[MaskedSpec(operand.quantizer, operands.rotation, memory=memory)] = None
                        found[UnrotateSpec(None, operands.rotation, output="rotated", masked=True)] = None
    return list(found)


def _operand_specs(q: Quantizer, rotation: Rotation | None, target: Target, read: dict[str, Any]) -> Iterator[KernelSpec]:
    """The kernels that one operand may need. read: how it lies in memory, and the quantizer of its codes where it has some."""
    kind: Any = PackedSpec if "source" in read else KernelSpec
    if "source" in read and read["source"].has_outer_scale:
        read["factor"] = "outer"
    yield kind(q, rotation, **read)
    yield kind(q, rotation, output="decoded", scaled=bool(q.outer), **read)
    if kind is KernelSpec and foldable(q) and target.name not in BLACKWELL:
        yield KernelSpec(q, rotation, output="decoded", factored=True, **read)
    if target.name in BLACKWELL and q.scale_format != "fp32":
        yield kind(q, rotation, scale_layout="swizzled", **read)
    if q.needs_amax and not q.has_outer_scale:
        yield kind(None, rotation, output="amax", **read)


def candidates(recipes: Sequence[str], target: Target, shapes: Sequence[Shape] = ()) -> list[Candidate]:
    """Every kernel that a step under the recipes needs on the target; its matmuls for the shapes (M, N, K) given, or any."""
    names = recipes or list(fp4.recipes())
    return [*(candidate(spec, target) for spec in quantize_specs(names, target)), *matmuls(names, target, shapes)]


def rows(kernels: Iterable[Candidate], target: Target) -> Iterator[Row]:
    """The kernels compiled and judged, one after the other."""
    for kernel in kernels:
        yield examine(kernel, target)


HEAD = ("kernel", "registers", "shared", "spills", "stack", "tensor memory", "conversions", "FP4 converts", "SASS")


def _cells(row: Row, names: Sequence[str]) -> list[str]:
    memory = (row.registers, row.shared, row.spills, row.stack, row.tensor_memory)
    figures = (*memory, row.conversions, row.converts, row.instructions)
    return [row.kernel, *(str(f) for f in figures), *(str(row.counts.get(name, "")) for name in names)]


def _grid(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for row in found for name in row.counts if name not in HEAD))
    return [*HEAD, *names], [_cells(row, names) for row in found]


def as_table(found: Sequence[Row], title: str) -> Table:
    """A rich table; a kernel with a fault is red."""
    head, lines = _grid(found)
    table = Table(*head, box=None, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row, line in zip(found, lines, strict=True):
        table.add_row(*(escape(cell) for cell in line), style="red" if row.faults else None)
    return table


def as_text(found: Sequence[Row]) -> str:
    """Columns of a fixed width, a line a kernel, whatever the terminal."""
    head, lines = _grid(found)
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    text = [
        [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))] for line in (head, *lines)
    ]
    return "\n".join("  ".join(line).rstrip() for line in text)


def as_markdown(found: Sequence[Row]) -> str:
    head, lines = _grid(found)
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def as_json(found: Sequence[Row], target: Target) -> str:
    return json.dumps({**versions(), "target": target.name, "kernels": [dataclasses.asdict(row) for row in found]}, indent=1)


def versions() -> dict[str, Any]:
    """What the figures depend on."""
    import triton

    return {"triton": triton.__version__, "fp4": fp4.__version__}
