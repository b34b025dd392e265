"""Instructions of an element in the quantize kernels, compiled for an H200 with no GPU, and what a copy leaves time for.

    python -m benchmarks.instructions

Of each kernel of ``benchmarks.gpu_kernels`` the SASS of the loop over tiles, with the usual tile: its instructions over the
elements of a thread. "slots": what all schedulers can issue while a copy moves the bytes of an element; a kernel of more
cannot be as fast as a copy. Writes results/instructions.json and prints a table.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.common import write
from benchmarks.gpu_kernels import speed_cases
from fp4.kernels.compile import compile_kernel
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import tile_of
from fp4.runtime.spec import NVFP4

TARGET = Target("sm_90")
PROCESSORS, SCHEDULERS, LANES, CLOCK, COPY = 132, 4, 32, 1.98e9, 4.13e12  # an H200; bytes a second, as measured
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\S+\s+)?(\S+)(.*)", re.MULTILINE)


def loop(sass: str) -> int:
    """Instructions of the loop over tiles, between a branch back and its target: the shortest but for those of less than .45 of
    the longest, since one of two loops is rare, and what is called from a loop may come back to it from behind the other.
    """
    lines = [(int(address, 16), name, rest) for address, name, rest in LINE.findall(sass)]
    loops = []
    for place, name, rest in lines:
        if name.startswith("BRA") and (found := re.search(r"0x([0-9a-f]+)", rest)):
            loops.append(sum(int(found[1], 16) <= address <= place for address, _, _ in lines))
    return min(length for length in loops if length > 0.45 * max(loops))


def moved(spec: KernelSpec) -> float:
    """Bytes that must move for an element of a BF16 operand."""
    q = spec.quantizer
    if spec.output == "packed":
        assert q is not None
        scale = 4 if q.scale_format == "fp32" else 1
        return 2 + (0.5 if q.packed else 1) + scale / (q.block[0] * q.block[1])
    return 2 if spec.output == "amax" else 4 if spec.dtype == "bf16" else 3


def main() -> None:
    slots = PROCESSORS * SCHEDULERS * LANES * CLOCK / COPY
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, taken: float, given: float, registers: int | None = None) -> None:
        most = min(1.0, given / taken)
        figures = {"instructions": round(taken, 1), "slots": round(given, 1), "at most, of a copy": round(most, 2)}
        found[name] = figures | ({} if registers is None else {"registers": registers})
        print(f"| {name} | {taken:.1f} | {given:.1f} | {most:.2f} | {registers or ''} |", flush=True)

    print("| kernel | instructions an element | slots | at most, of a copy | registers |\n|---|---|---|---|---|")
    for name, spec in speed_cases():
        tile, compiled = tile_of(spec, TARGET), compile_kernel(spec, TARGET)
        taken = loop(compiled.sass) / (tile.rows * tile.units * spec.unit / (32 * tile.warps))
        add(name, taken, slots * moved(spec), compiled.registers)
    one, other = (found[f"nearest packed{memory}"]["instructions"] for memory in ("", ", along dim 0"))
    add("nearest packed, both orientations in one read", one + other, slots * (2 * moved(KernelSpec(NVFP4())) - 2))
    write("instructions", {"target": TARGET.name, "run": "compiled and inspected, not run", "kernels": found})


if __name__ == "__main__":
    main()
