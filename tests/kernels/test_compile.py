"""Kernels compiled here, with no GPU, for every architecture: which instructions they are made of."""

from __future__ import annotations

import re

import pytest

from fp4.kernels.build import build
from fp4.kernels.codegen import source
from fp4.kernels.compile import _compile, _type, candidate, compile_kernel, describe
from fp4.kernels.helpers import HELPERS
from fp4.kernels.inspection import TO_FP4, examine
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target, TargetError
from fp4.kernels.tiles import Tile, tile_of
from fp4.runtime.spec import MXFP4, NVFP4, Rotation, SpecError

H16, H128 = Rotation(16, signs="fixed"), Rotation(128, signs="fresh", bf16=False)
IN_REGISTERS = (
    KernelSpec(NVFP4()),
    KernelSpec(NVFP4(), output="decoded"),
    KernelSpec(NVFP4(), H16),
    KernelSpec(NVFP4(), H16, output="decoded"),
    KernelSpec(NVFP4(rounding="stochastic")),
    KernelSpec(NVFP4(four_six=True)),
    KernelSpec(None, H16, output="rotated"),
)
OTHERS = (
    KernelSpec(NVFP4(), memory="columns"),
    KernelSpec(NVFP4(), H16, memory="columns"),
    KernelSpec(NVFP4(block=(16, 16))),
    KernelSpec(NVFP4(), output="decoded", factored=True),
    KernelSpec(NVFP4(rounding="ms_eden"), H128),
    KernelSpec(MXFP4(scale_rule="quest"), Rotation(32, bf16=False)),
)
# Flushing or approximate FP32 arithmetic; the approximate reciprocal that `near_inverse` corrects to the nearest is none.
FORBIDDEN = re.compile(r"\.ftz|\.approx|div\.full|mad\.f32")
CORRECTED = re.compile(
    r"rcp\.approx\.ftz\.f32 r, (\S+);\s+fma\.rn\.f32 e, \1, r, 0fBF800000;\s+neg\.f32 e, e;\s+fma\.rn\.f32 \S+, r, e, r;"
)


def inexact(ptx: str) -> list[str]:
    """What of the PTX is not IEEE arithmetic."""
    return FORBIDDEN.findall(CORRECTED.sub("", ptx))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("spec", IN_REGISTERS + OTHERS, ids=str)
def test_arithmetic_is_ieee_and_nothing_spills(spec: KernelSpec, target: str) -> None:
    compiled = compile_kernel(spec, Target(target))
    assert inexact(compiled.ptx) == []
    text, tile = source(spec, Target(target)), tile_of(spec, Target(target))
    if "tl.fma(" not in text:  # an exact product, or a remainder, where the source says so; and one of each bent element
        elements = tile.rows * tile.units * spec.unit // (32 * tile.warps)
        assert CORRECTED.sub("", compiled.ptx).count("fma.rn.f32") == ("def bent(" in text) * elements
    assert (compiled.spills, compiled.stack) == (0, 0)
    assert compiled.count("STG") > 0
    assert compiled.count("LDG.E.128" if spec.memory == "rows" else "LDG.E.64") > 0


SIX = NVFP4(four_six=True)
LIMITED = [
    pytest.param(KernelSpec(q, rotation, input=dtype, output=output), id=f"{q} {rotation} {dtype} {output}", marks=marks)
    for q, rotation, dtype, output, marks in (
        (SIX, None, "bf16", "packed", ()),
        (SIX, None, "fp32", "packed", ()),
        (SIX, H128, "bf16", "packed", pytest.mark.slow),
        (SIX, H128, "bf16", "decoded", pytest.mark.slow),
        (NVFP4(four_six=True, block=(16, 16)), None, "bf16", "packed", pytest.mark.slow),
        (NVFP4(four_six=True, block=(16, 16)), None, "bf16", "decoded", pytest.mark.slow),
    )
]


@pytest.mark.parametrize("spec", LIMITED)
def test_a_limit_of_registers_makes_no_stack(spec: KernelSpec) -> None:
    """Of the kernels for which `tiles` knows one."""
    compiled = compile_kernel(spec, Target("sm_90"))
    assert (compiled.spills, compiled.stack) == (0, 0)


@pytest.mark.parametrize("spec", IN_REGISTERS, ids=str)
def test_a_thread_keeps_its_blocks_in_registers(spec: KernelSpec) -> None:
    """Of one block a thread no value goes to another thread, neither for the amax nor for the butterflies."""
    compiled = compile_kernel(spec, Target("sm_90"))
    assert compiled.shared == 0
    assert compiled.count("SHFL|LDS|STS") == 0


@pytest.mark.parametrize("target", ["sm_90", "sm_100a"])
def test_a_transpose_is_stored_as_a_row_s_neighbours(target: str) -> None:
    """Codes sixteen bytes and scales four at once, where tiles are whole."""
    spec = KernelSpec(NVFP4(), memory="columns")
    compiled = compile_kernel(spec, Target(target))
    assert compiled.count("STG.E.128") > 0
    assert compiled.count("STG.E.U8") == 0
    assert compile_kernel(spec, Target(target), whole=False).count("STG.E.U8") > 0


@pytest.mark.parametrize(
    ("quantizer", "output"),
    [(NVFP4(), "packed"), (NVFP4(outer=128), "decoded"), (NVFP4(rounding="ms_eden", posthoc=True), "packed")],
)
def test_only_decoded_values_have_one_scale_with_a_factor(quantizer: NVFP4, output: str) -> None:
    with pytest.raises(SpecError, match="factored=True"):
        KernelSpec(quantizer, output=output, factored=True)


@pytest.mark.parametrize("single", [True, False])
def test_one_column_is_not_compiled_in(single: bool) -> None:
    """Triton compiles in an argument that is 1. Then columns are known to be equal, and ptxas leaves out conversions of eight
    values to codes, two an instruction, whose results it packs all the same: what `single` is for."""
    target = Target("sm_90")
    spec = KernelSpec(NVFP4(), aligned=False, single=single)
    kernel, tile = build(source(spec, target)), tile_of(spec, target)
    types = {name: _type(name, spec) for name in kernel.arg_names}
    compiled = _compile(kernel, types, {**tile.constants(False), "stride_c": 1, "columns": 1}, tile, target)
    conversions = compiled.count("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C") - 1  # of the block's scale
    assert (conversions == 16 // 2) == single


def arithmetic(helper: str, target: Target) -> list[str]:
    """SASS of a helper of one FP32 argument, registers by the order in which they are met."""
    text = f"import triton\nimport triton.language as tl\n\n\n{HELPERS[helper]}\n\n\n"
    text += f"@triton.jit\ndef kernel(x_ptr):\n    i = x_ptr + tl.arange(0, 32)\n    tl.store(i, {helper}(tl.load(i)))\n"
    compiled = _compile(build(text), {"x_ptr": "*fp32"}, {}, Tile(1, 1, 1), target)
    lines = re.findall(r"((?:MUFU|FFMA|FADD)[^;]*?) ;", compiled.sass)
    first = next(line for line in lines if line.startswith("MUFU"))
    names: dict[str, str] = {}
    return [re.sub(r"R\d+", lambda r: names.setdefault(r[0], f"r{len(names)}"), line) for line in lines[lines.index(first) :]]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100a", "sm_120a"])
def test_the_reciprocal_is_what_the_assembler_makes_of_rcp_rn(target: str) -> None:
    """`near_inverse` has the instructions of rcp.rn.f32 where that takes no branch, so its results are the nearest."""
    rounded = arithmetic("inverse_of", Target(target))[:4]
    assert rounded == ["MUFU.RCP r0, r1", "FFMA r2, r1, r0, -1", "FADD.FTZ r2, -r2, -RZ", "FFMA r0, r0, r2, r0"]
    assert arithmetic("near_inverse", Target(target)) == [*rounded[:2], "FFMA r0, r0, -r2, r0"]


NATIVE = (
    KernelSpec(NVFP4()),
    KernelSpec(NVFP4(), H16, output="decoded", memory="columns"),
    KernelSpec(NVFP4(block=(1, 8))),
    KernelSpec(NVFP4(four_six=True)),
    KernelSpec(NVFP4(rounding="ms_eden"), H128),
    KernelSpec(MXFP4(), scale_layout="swizzled"),
)


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("spec", NATIVE, ids=describe)
def test_blackwell_rounds_by_its_own_instruction(spec: KernelSpec, target: str) -> None:
    row = examine(candidate(spec, Target(target)), Target(target))
    assert row.faults == ()
    assert row.converts > 0


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_stochastic_rounding_by_its_own_instruction(target: str) -> None:
    spec = KernelSpec(NVFP4(rounding="stochastic"), native_draws=True)
    compiled = compile_kernel(spec, Target(target))
    assert compiled.ptx.count("cvt.rs.satfinite.e2m1x4.f32") * 2 == compiled.count(TO_FP4) > 0
    assert compiled.count(r"F2FP\.\S*\.RS") == compiled.count(TO_FP4)
    assert (compiled.spills, compiled.stack) == (0, 0)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120a"])
def test_a_target_without_the_instruction_refuses(target: str) -> None:
    with pytest.raises(TargetError, match=f"{target} has no cvt.rs"):
        source(KernelSpec(NVFP4(rounding="stochastic"), native_draws=True), Target(target))


def test_a_transpose_is_rotated_in_registers() -> None:
    compiled = compile_kernel(KernelSpec(NVFP4(), H16, memory="columns"), Target("sm_90"), Tile(64, 8, 4))
    assert compiled.count("SHFL") == 0
    assert compiled.shared == 64 * 8 * 8  # the codes alone, on their way to coalesced stores
