"""Compile kernels for an architecture without a GPU, and read what the assembler made of them."""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4.kernels.build import COMPILE_OPTIONS, build
from fp4.kernels.codegen import source
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, tile_of

_POINTER = {
    "x_ptr": {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"},
    "y_ptr": {"bf16": "*bf16", "fp32": "*fp32", "e4m3": "*u8", "e5m2": "*u8"},
}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """What one kernel is on one architecture.

    registers: of a thread. shared: bytes of a program. spills: bytes a thread of local memory. stack: bytes a thread.
    instructions: SASS opcodes by count, static.
    """

    registers: int
    shared: int
    spills: int
    stack: int
    conversions: int
    instructions: dict[str, int]
    ptx: str
    ttgir: str

    def count(self, pattern: str) -> int:
        """Static SASS instructions whose opcode matches the pattern from its start."""
        return sum(n for name, n in self.instructions.items() if re.match(pattern, name))


def compile_kernel(spec: KernelSpec, target: Target, tile: Tile | None = None) -> Compiled:
    """Compile the kernel of `spec` as the launcher would for a contiguous operand whose sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = build(source(spec, target))
    tile = tile or tile_of(spec, target)
    ones = {"rows": "stride_c", "columns": "stride_r"}[spec.memory]
    constants: dict[Any, Any] = {"TR": tile.rows, "TB": tile.units, ones: 1}
    signature = {name: "constexpr" if name in constants else _type(name, spec) for name in kernel.arg_names}
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (i,): divisible for i, name in enumerate(kernel.arg_names) if name not in constants and not name.endswith("site")
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", target.capability, 32),
        options={"num_warps": tile.warps, **COMPILE_OPTIONS},
    )
    return _inspect(compiled)


def _type(name: str, spec: KernelSpec) -> str:
    if name == "x_ptr":
        return _POINTER[name][spec.input]
    if name == "y_ptr":
        return _POINTER[name][spec.dtype]
    if name == "codes_ptr":
        assert spec.quantizer is not None
        return "*u8" if not spec.quantizer.packed else "*i64" if spec.unit == 16 else "*i32"
    if name == "scales_ptr":
        return "*fp32" if spec.fp8_blocks else "*u8"
    if name == "amax_ptr":
        return "*i32" if spec.output == "amax" else "*fp32"
    return {"seed_ptr": "*i64", "tensor_scale_ptr": "*fp32"}.get(name, "i32")


def _inspect(compiled: Any) -> Compiled:
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
    )
