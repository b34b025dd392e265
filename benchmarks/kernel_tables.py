"""Every quantize kernel of every recipe compiled for each architecture with no GPU: results/kernels_TARGET.json.

The matmuls are those of `blackwell_kernels`.

python -m benchmarks.kernel_tables [TARGET ...]     compile, inspect, write
python -m benchmarks.kernel_tables --docs           print the table of docs/kernels.md from what was written
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fp4
from benchmarks.common import RESULTS
from fp4.kernel_table import quantize_specs, rows, versions
from fp4.kernels.compile import candidate
from fp4.kernels.target import Target

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100a", "sm_103a", "sm_120a")
FIELDS = ("registers", "shared", "spills", "stack", "conversions", "converts", "instructions", "counts", "faults")
SHOWN = (
    "packed nvfp4",
    "decoded bf16 nvfp4",
    "packed nvfp4[block=16x16]",
    "packed nvfp4[rounding=stochastic]",
    "packed nvfp4[four_six=yes]",
    "packed nvfp4 after hadamard[signs=fixed], columns",
    "packed nvfp4[rounding=ms_eden] after hadamard[size=128,signs=fresh,bf16=no], columns",
    "packed mxfp4[scale_rule=even] after hadamard[bf16=no]",
    "packed mxfp8",
    "packed fp8[block=128x128]",
)


def path(target: str) -> Path:
    return RESULTS / f"kernels_{target}.json"


def measure(target: str) -> dict[str, Any]:
    """A target's figures, a list of FIELDS for each kernel."""
    where, kernels = Target(target), {}
    for row in rows([candidate(spec, where) for spec in quantize_specs(fp4.recipes(), where)], where):
        kernels[row.kernel] = [getattr(row, field) for field in FIELDS]
        print(target, row.kernel, *kernels[row.kernel], flush=True)
    return {**versions(), "target": target, "run": "compiled and inspected, not run", "fields": FIELDS, "kernels": kernels}


def write(target: str) -> None:
    figures = measure(target)
    kernels = figures.pop("kernels")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in kernels.items())
    head = json.dumps(figures, indent=1).removesuffix("\n}")
    path(target).write_text(f'{head},\n "kernels": {{\n{lines}\n }}\n}}\n')


def read(target: str) -> dict[str, dict[str, Any]]:
    """The figures of each kernel by its name."""
    found = json.loads(path(target).read_text())
    return {name: dict(zip(found["fields"], values, strict=True)) for name, values in found["kernels"].items()}


def docs() -> str:
    """The summary of each target, then kernels on three of them: registers / static instructions / FP4 converts."""
    lines = [
        "| | kernels | registers, at most | shared memory, at most | spills, stack | FP4 converts |",
        "|---|---|---|---|---|---|",
    ]
    tables = {target: read(target) for target in TARGETS if path(target).exists()}
    for target, kernels in tables.items():
        most = {field: max(k[field] for k in kernels.values()) for field in ("registers", "shared", "spills", "stack")}
        converts = sum(k["converts"] > 0 for k in kernels.values())
        lines.append(
            f"| {target} | {len(kernels)} | {most['registers']} | {most['shared'] / 1024:.0f} KiB | "
            f"{most['spills']}, {most['stack']} | {f'in {converts}' if converts else 'none'} |"
        )
    targets = [target for target in ("sm_90", "sm_100a", "sm_120a") if target in tables]
    lines += ["", f"| registers / instructions / FP4 converts | {' | '.join(targets)} |", "|---" * (len(targets) + 1) + "|"]
    for name in SHOWN:
        cells = (tables[target][name] for target in targets)
        lines.append(
            f"| {name} | " + " | ".join(f"{c['registers']} / {c['instructions']} / {c['converts']}" for c in cells) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if "--docs" in sys.argv:
        print(docs())
    else:
        for name in sys.argv[1:] or TARGETS:
            write(name)
