"""Compile a generated kernel for an architecture, without a GPU."""

from __future__ import annotations

from typing import Any

from fp4.kernels import both
from fp4.kernels.both import BothSpec
from fp4.kernels.build import COMPILE_OPTIONS, build
from fp4.kernels.codegen import source
from fp4.kernels.inspection import TO_FP4, Candidate, Compiled, inspect
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.masks import MaskedSpec, UnrotateSpec
from fp4.kernels.native import rounds_natively
from fp4.kernels.packed import PackedSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, tile_of

_POINTER = {
    "x_ptr": {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"},
    "y_ptr": {"bf16": "*bf16", "fp32": "*fp32", "e4m3": "*u8", "e5m2": "*u8"},
}


def compile_kernel(spec: KernelSpec, target: Target, tile: Tile | None = None, whole: bool = True) -> Compiled:
    """Compile the kernel of `spec` as the launcher would for a contiguous operand whose sizes are multiples of 16.

    whole: of whole tiles.
    """
    kernel = build(source(spec, target))
    tile = tile or tile_of(spec, target)
    constants: dict[Any, Any] = tile.constants(whole)
    if "stride_r" in kernel.arg_names:
        constants[{"rows": "stride_c", "columns": "stride_r"}[spec.memory]] = 1
    types = {name: _type(name, spec) for name in kernel.arg_names}
    return _compile(kernel, types, constants, tile, target)


def compile_both(spec: BothSpec, target: Target, tile: Tile | None = None) -> Compiled:
    """As `compile_kernel`, of the kernel of both orientations."""
    kernel = build(both.source(spec, target))
    tile = tile or both.tile_of(spec)
    types = {}
    for name in kernel.arg_names:
        part, _, own = name.partition("_")
        types[name] = _type(own, getattr(spec, part)) if part in both.PARTS and own else _type(name, spec.rows)
    return _compile(kernel, types, {**tile.constants(True), "stride_c": 1}, tile, target)


def _compile(kernel: Any, types: dict[str, str], constants: dict[Any, Any], tile: Tile, target: Target) -> Compiled:
    """types: of the arguments. constants: those that are known."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    divisible = [["tt.divisibility", 16]]
    attributes: dict[Any, Any] = {
        (i,): divisible for i, name in enumerate(kernel.arg_names) if name not in constants and not name.endswith("site")
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", target.capability, 32),
        options={**tile.options, **COMPILE_OPTIONS},
    )
    return inspect(compiled)


def _type(name: str, spec: KernelSpec) -> str:
    if name in spec.pointer_types:
        return spec.pointer_types[name]
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
    return {"seed_ptr": "*i64", "tensor_scale_ptr": "*fp32", "factor_ptr": "*fp32"}.get(name, "i32")


def candidate(spec: KernelSpec, target: Target) -> Candidate:
    """The kernel of `spec` with its usual tile, to be compiled and judged.

    Where the target converts to E2M1 itself, the PTX must have a convert for every two elements of a thread (four_six rounds
    each twice; a stochastic convert takes four), and the SASS must have some: the assembler may share one.
    """
    needs: dict[str, tuple[str, int]] = {}
    if rounds_natively(spec, target):
        needs["FP4 converts"] = (TO_FP4, 1)
    return Candidate(
        name=describe(spec),
        family="quantize",
        compile=lambda where: compile_kernel(spec, where),
        source=lambda where: source(spec, where),
        needs=needs,
        check=lambda compiled, where: _converts(spec, where, compiled.ptx),
    )


def _converts(spec: KernelSpec, target: Target, ptx: str) -> list[str]:
    """Other than as many conversions to E2M1 in the PTX as the tile needs?"""
    wanted, instruction = 0, "cvt.rs.satfinite.e2m1x4.f32" if spec.native_draws else "cvt.rn.satfinite.e2m1x2.f32"
    if rounds_natively(spec, target):
        tile, twice = tile_of(spec, target), getattr(spec.quantizer, "four_six", False)
        elements = tile.rows * tile.units * spec.unit // (tile.warps * 32)
        wanted = elements // (4 if spec.native_draws else 2) * (2 if twice else 1)
    count = ptx.count(instruction)
    return [] if count == wanted else [f"{count} of {instruction} in the PTX; the tile needs {wanted}"]


def describe(spec: KernelSpec) -> str:
    """One line that tells a kernel from the others: "packed nvfp4 after hadamard, columns"."""
    output = {"decoded": f"decoded {spec.dtype}", "values": f"values {spec.dtype}"}.get(spec.output, spec.output)
    if isinstance(spec, MaskedSpec):
        output = "packed and masked"
    elif isinstance(spec, UnrotateSpec):
        output = "masked and rotated back by" if spec.masked else "rotated back by"
    parts = [output, *([str(spec.quantizer)] if spec.quantizer else [])]
    if spec.rotation is not None and spec.output != "rotated":
        parts.append("after")
    if spec.rotation is not None:
        parts.append(str(spec.rotation))
    text = " ".join(parts)
    if isinstance(spec, PackedSpec):
        text += f" of packed {spec.source}" + (f" with {spec.factor} scale" if spec.factor != "none" else "")
    for word, said in (
        ("with tensor scale", spec.scaled),
        ("with a factor", spec.factored),
        ("columns", spec.memory == "columns"),
        ("swizzled scales", spec.scale_layout == "swizzled"),
        ("native draws", spec.native_draws),
        (f"from {spec.input}", spec.input != "bf16"),
    ):
        text += f", {word}" if said else ""
    return text
