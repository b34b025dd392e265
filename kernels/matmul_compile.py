"""Compile a matmul kernel for an architecture without a GPU, and say what is wrong with what came out.

That it compiled proves nothing: a tile whose accumulator does not fit into tensor memory becomes an empty kernel, and a pair of
operands without an instruction is decoded and multiplied in BF16.
"""

from __future__ import annotations

import re
from typing import Any

from fp4.kernels.build import COMPILE_OPTIONS, build
from fp4.kernels.inspection import Candidate, Compiled, inspect
from fp4.kernels.inspection import faults as common_faults
from fp4.kernels.matmul_codegen import pointers, source
from fp4.kernels.matmul_spec import (
    FORMATS,
    TENSOR_MEMORY_COLUMNS,
    Instruction,
    MatmulSpec,
    MatmulTile,
    instruction,
    needed,
)
from fp4.kernels.target import Target

_FLOATS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
_ELEMENTS = {"e2m1": "u8", "e4m3": "fp8e4nv", "e5m2": "fp8e5"}
TMA_LOADS = "UTMALDG"
_SCALES = {"e4m3": "fp8e4nv", "e8m0": "u8"}


def compile_matmul(spec: MatmulSpec, target: Target, tile: MatmulTile) -> Compiled:
    """Compile the kernel as the launcher would for sizes that are multiples of 16. Raises RuntimeError where Triton refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = build(source(spec, target, tile))
    signature: dict[str, str] = {}
    for name, form, rows in (("a", spec.a, tile.m), ("b", spec.b, tile.n)):
        f = FORMATS[form]
        signature[name] = f"tensordesc<{_ELEMENTS[f.element]}[{rows},{tile.k // f.per_byte}]>"
        signature[f"{name}_scales"] = f"tensordesc<{_SCALES[f.scale]}[1,{rows // 128},{tile.k // f.block // 4},2,256]>"
    for name in pointers(spec):
        signature[name] = _FLOATS[spec.output if name == "y_ptr" else spec.bias or ""] if "alpha" not in name else "*fp32"
    signature |= dict.fromkeys(("M", "N", "K", "stride_y"), "i32")
    plain = [i for i, kind in enumerate(signature.values()) if not kind.startswith("tensordesc")]
    attributes: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i in plain}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs={}, attrs=attributes),
        target=GPUTarget("cuda", target.capability, 32),
        options={"num_warps": tile.warps, **COMPILE_OPTIONS},
    )
    return inspect(compiled)


def faults(compiled: Compiled, spec: MatmulSpec, target: Target, tile: MatmulTile) -> list[str]:
    """What is wrong with a compiled matmul; empty for one that may be launched.

    What is wrong with any kernel (nothing stored, local memory, stack, shared memory), and: the instruction, of the right kind
    and block size, in PTX and SASS alike, as often as the tile needs it, once or (a peeled iteration) a few times over; no
    other MMA; loads by TMA; scales and accumulator in tensor memory where the target has it, within its columns; the warp
    partitions of a specialized tile.
    """
    return [*common_faults(compiled, target, {}), *_own_faults(compiled, spec, target, tile)]


def _own_faults(compiled: Compiled, spec: MatmulSpec, target: Target, tile: MatmulTile) -> list[str]:
    wanted = instruction(spec.a, spec.b, target)
    if isinstance(wanted, str):
        return [wanted]
    found = []
    ptx = len(re.findall(wanted.ptx, compiled.ptx))
    sass = compiled.count(wanted.sass)
    per_step = needed(spec, target, tile)
    if sass == 0:
        others = sorted(n for n in compiled.instructions if "MMA" in n)
        found.append(
            f"no {wanted.sass} in the SASS; " + (f"it multiplies by {', '.join(others)}" if others else "it has no MMA")
        )
    elif ptx != sass:
        found.append(f"{ptx} MMA in the PTX, {sass} in the SASS")
    elif sass % per_step or sass // per_step > 4:
        found.append(f"{sass} MMA; a step of {tile.m}x{tile.n}x{tile.k} needs {per_step}")
    if other := _other_mma(compiled, wanted):
        found.append(f"it also multiplies by {other}")
    if (loads := compiled.count(TMA_LOADS)) < 4:
        found.append(f"{loads} TMA loads; a, b and their scales need 4")
    if wanted.rows == 0 and sass and not (compiled.count("UTCCP") and compiled.count("LDTM")):
        found.append("its scales or its accumulator are not in tensor memory")
    if compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        found.append(f"{compiled.tensor_memory} columns of tensor memory; there are {TENSOR_MEMORY_COLUMNS}")
    if local := compiled.count("LDL|STL"):
        found.append(f"{local} local loads and stores")
    if tile.specialized and "ttg.warp_specialize" not in compiled.ttgir:
        found.append("its warps are not specialized")
    return found


def _other_mma(compiled: Compiled, wanted: Instruction) -> str:
    matrix = re.compile(r"(UTC[A-Z]*MMA|[A-Z]*G?MMA)")
    return ", ".join(sorted(n for n in compiled.instructions if matrix.match(n) and not re.match(wanted.sass, n)))


def candidate(spec: MatmulSpec, target: Target, tile: MatmulTile) -> Candidate:
    """The matmul with a tile, to be compiled and judged for the target."""
    wanted = instruction(spec.a, spec.b, target)
    needs = {"TMA loads": (TMA_LOADS, 4)}
    if isinstance(wanted, Instruction):
        needs = {"FP4 or FP8 MMA": (wanted.sass, needed(spec, target, tile)), **needs}
        if wanted.rows == 0:
            needs |= {"tensor memory loads": ("LDTM", 1), "scale copies": ("UTCCP", 1)}
    return Candidate(
        name=describe(spec, tile),
        family="matmul",
        compile=lambda where: compile_matmul(spec, where, tile),
        source=lambda where: source(spec, where, tile),
        needs=needs,
        check=lambda compiled, where: _own_faults(compiled, spec, where, tile),
    )


def describe(spec: MatmulSpec, tile: MatmulTile) -> str:
    """One line that tells a matmul from the others: "matmul nvfp4 x nvfp4 to bf16, 128x256x256 stages=3 warps=8 persistent"."""
    words = [f"matmul {spec.a} x {spec.b} to {spec.output}"]
    words += [f"{spec.alphas} factor" + "s" * (spec.alphas > 1)] * bool(spec.alphas)
    words += (
        ["partial sums"] * spec.partial + ["accumulated"] * spec.accumulate + [f"bias {spec.bias}"] * (spec.bias is not None)
    )
    return ", ".join([*words, str(tile)])
