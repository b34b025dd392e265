"""What the assembler made of a kernel: registers, memory and instructions, and what is wrong with them.

Nothing here knows a family of kernels: quantize and matmul kernels are `Candidate`s, compiled and judged by the same rules.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4.kernels.target import Target

LEVELS = ("source", "ttir", "ttgir", "llir", "ptx", "sass")
# Bytes of shared memory that a program may have (CUDA programming guide, technical specifications per compute capability).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)
# Stores to global memory, by threads, by TMA, or as a reduction there.
STORES = "STG|UTMASTG|UTMAREDG|UBLKCP|RED|ATOMG"
TO_FP4 = r"F2FP\.SATFINITE\.E2M1"  # two FP32 values, or four in two instructions


@dataclass(frozen=True)
class Compiled:
    """What one kernel is on one architecture.

    registers: of a thread. shared: bytes of a program. spills: bytes a thread of local memory. stack: bytes a thread.
    conversions: layout conversions in TTGIR. instructions: SASS opcodes by count, static. tensor_memory: columns of a program
    (sm_100, sm_103).
    """

    registers: int
    shared: int
    spills: int
    stack: int
    conversions: int
    instructions: dict[str, int]
    ptx: str
    ttgir: str
    ttir: str = ""
    llir: str = ""
    sass: str = ""
    tensor_memory: int = 0

    def count(self, pattern: str) -> int:
        """Static SASS instructions whose opcode matches the pattern from its start."""
        return sum(n for name, n in self.instructions.items() if re.match(pattern, name))


def inspect(compiled: Any) -> Compiled:
    """Read a ``triton.compiler.CompiledKernel`` with the tools that Triton brings."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

        def run(option: str) -> str:
            return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout

        usage, sass = run("-res-usage"), run("-sass")
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        registers=found["REG"],
        shared=compiled.metadata.shared,
        spills=found["LOCAL"],
        stack=found["STACK"],
        conversions=compiled.asm["ttgir"].count("ttg.convert_layout"),
        instructions=dict(collections.Counter(_INSTRUCTION.findall(sass))),
        ptx=compiled.asm["ptx"],
        ttgir=compiled.asm["ttgir"],
        ttir=compiled.asm["ttir"],
        llir=compiled.asm["llir"],
        sass=sass,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
    )


@dataclass(frozen=True)
class Candidate:
    """A kernel that is to be compiled and judged.

    name: unique in its list. family: "quantize" or "matmul". compile: for a target. source: the Triton source for it.
    needs: the least count of SASS instructions by a name that the table shows, (pattern, count) each. check: more faults that
    only kernels of its kind have.
    """

    name: str
    family: str
    compile: Callable[[Target], Compiled]
    source: Callable[[Target], str]
    needs: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    check: Callable[[Compiled, Target], Sequence[str]] = lambda compiled, target: ()


@dataclass(frozen=True)
class Row:
    """One kernel's line: what it takes of the GPU, and its faults, by name.

    counts: of the instructions that the candidate needs, by their names. faults: empty for a good kernel.
    """

    kernel: str
    family: str
    target: str
    registers: int
    shared: int
    spills: int
    stack: int
    tensor_memory: int
    conversions: int
    converts: int
    instructions: int
    counts: dict[str, int]
    faults: tuple[str, ...]


def examine(candidate: Candidate, target: Target) -> Row:
    """Compile a candidate and judge it. A compiler that refuses is a fault, not an exception."""
    try:
        compiled = candidate.compile(target)
    except Exception as error:
        reason = f"does not compile: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return Row(candidate.name, candidate.family, target.name, 0, 0, 0, 0, 0, 0, 0, 0, {}, (reason,))
    return judged(candidate, target, compiled)


def judged(candidate: Candidate, target: Target, compiled: Compiled) -> Row:
    """The row of a compiled candidate."""
    counts = {name: compiled.count(pattern) for name, (pattern, _) in candidate.needs.items()}
    return Row(
        kernel=candidate.name,
        family=candidate.family,
        target=target.name,
        registers=compiled.registers,
        shared=compiled.shared,
        spills=compiled.spills,
        stack=compiled.stack,
        tensor_memory=compiled.tensor_memory,
        conversions=compiled.conversions,
        converts=compiled.count(TO_FP4),
        instructions=sum(compiled.instructions.values()),
        counts=counts,
        faults=(*faults(compiled, target, candidate.needs), *candidate.check(compiled, target)),
    )


def faults(compiled: Compiled, target: Target, needs: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Why a kernel must not be used, one reason each."""
    found = []
    if compiled.count(STORES) == 0:
        found.append("empty: it stores nothing")
    if compiled.spills:
        found.append(f"spills: {compiled.spills} bytes a thread of local memory")
    if compiled.stack:
        found.append(f"stack: {compiled.stack} bytes a thread")
    if (limit := SHARED_LIMIT[target.capability]) < compiled.shared:
        found.append(f"shared memory: {compiled.shared} bytes, {target.name} has {limit}")
    for name, (pattern, least) in needs.items():
        if (count := compiled.count(pattern)) < least:
            found.append(f"missing {name}: {count} of {pattern}, at least {least} expected")
    return tuple(found)
