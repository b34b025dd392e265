"""Compile and inspect every matmul of every recipe for every target with block-scaled tensor cores: no GPU is needed.

``python -m benchmarks.blackwell_kernels`` writes results/blackwell_kernels.json and prints the table of docs/blackwell.md. It
fails where a kernel has a fault.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import triton

import fp4
from benchmarks.common import write
from fp4.kernels.inspection import Row, examine
from fp4.kernels.matmul_compile import candidate
from fp4.kernels.matmul_spec import Instruction, MatmulSpec, instruction, tiles
from fp4.kernels.target import Target
from fp4.matmul_table import emulated, matmuls

TARGETS = ("sm_100a", "sm_103a", "sm_120a")
# What no recipe needs: operands of two formats, and a weight gradient added to in FP32.
MORE = (
    MatmulSpec("mxfp8_e4m3", "mxfp4", alphas=0),
    MatmulSpec("mxfp8_e5m2", "mxfp8_e4m3", alphas=0),
    MatmulSpec("nvfp4", "nvfp4", output="fp32", accumulate=True),
    MatmulSpec("mxfp4", "mxfp4", output="fp32", accumulate=True),
)


def rows(target: Target) -> list[Row]:
    found = matmuls(fp4.recipes(), target)
    for spec in MORE:
        if isinstance(instruction(spec.a, spec.b, target), Instruction):
            found += [candidate(spec, target, tile) for tile in tiles(spec, target)]
    return [examine(c, target) for c in found]


def span(values: list[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def table(found: list[Row]) -> str:
    """A line for each target and pair of formats."""
    lines = [
        "| target | operands | kernels | with a fault | registers | shared, KiB | tensor memory |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[Any, list[Row]] = {}
    for row in found:
        groups.setdefault((row.target, row.kernel.split(" to ")[0].removeprefix("matmul ")), []).append(row)
    for (target, pair), group in groups.items():
        faults = sum(bool(r.faults) for r in group)
        shared = span([round(r.shared / 1024) for r in group])
        cells = (
            target,
            pair,
            len(group),
            faults,
            span([r.registers for r in group]),
            shared,
            span([r.tensor_memory for r in group]),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    found = [row for name in TARGETS for row in rows(Target(name))]
    left = {name: emulated(fp4.recipes(), Target(name)) for name in (*TARGETS, "sm_121a")}
    kernels = [dataclasses.asdict(row) for row in found]
    write("blackwell_kernels", {"triton": triton.__version__, "kernels": kernels, "emulated": left})
    print(table(found))
    if bad := [row for row in found if row.faults]:
        sys.exit("\n".join(f"{row.target} {row.kernel}: {'; '.join(row.faults)}" for row in bad))


if __name__ == "__main__":
    main()
