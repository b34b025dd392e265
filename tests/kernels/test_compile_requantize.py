"""The kernels that read codes, of the clip mask and of post hoc alignment, compiled here with no GPU and inspected."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fp4.kernels.build import COMPILE_OPTIONS, build
from fp4.kernels.compile import compile_kernel
from fp4.kernels.fp8 import fp8_spec
from fp4.kernels.inspection import Compiled, inspect
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.masks import MaskedSpec, UnrotateSpec
from fp4.kernels.packed import PackedSpec
from fp4.kernels.posthoc import PER_PROGRAM, second_source
from fp4.kernels.target import Target
from fp4.kernels.tiles import tile_of
from fp4.runtime.spec import MXFP4, NVFP4, Rotation
from tests.kernels.requantizing import RECIPES
from tests.kernels.test_compile import inexact

H32, H128 = Rotation(32, bf16=False), Rotation(128, signs="fresh", bf16=False)
POSTHOC = NVFP4(rounding="ms_eden", posthoc=True)
(EDEN_SOURCE, EDEN, _), (QUEST, RANGE_FIT, FRESH) = RECIPES
SPECS: dict[str, KernelSpec] = {
    "quartet2 decoded": PackedSpec(EDEN, H128, memory="columns", source=EDEN_SOURCE, output="decoded"),
    "quartet2 packed": PackedSpec(EDEN, H128, memory="columns", source=EDEN_SOURCE),
    "quartet2 amax": PackedSpec(None, H128, memory="columns", source=EDEN_SOURCE, output="amax"),
    "quartet2 posthoc": PackedSpec(POSTHOC, H128, memory="columns", source=EDEN_SOURCE),
    "quartet decoded": PackedSpec(RANGE_FIT, FRESH, memory="columns", source=QUEST, output="decoded"),
    "signs of one unit": PackedSpec(
        NVFP4(rounding="stochastic"),
        Rotation(16, signs="fresh"),
        "decoded",
        memory="columns",
        source=NVFP4(outer=128),
        factor="outer",
    ),
    "signs of one unit, rows": PackedSpec(NVFP4(), Rotation(16, signs="fresh"), source=NVFP4()),
    "rows decoded": PackedSpec(NVFP4(), source=NVFP4(), output="decoded"),
    "the packed matrix itself": PackedSpec(EDEN, H128, source=EDEN_SOURCE),
    "decode": PackedSpec(None, output="values", source=EDEN, input="fp32"),
    "posthoc": KernelSpec(POSTHOC, H128),
    "posthoc, columns": KernelSpec(POSTHOC, H128, memory="columns"),
    "mask": MaskedSpec(MXFP4(scale_rule="quest"), H32),
    "rotate back": UnrotateSpec(None, H32, output="rotated", masked=True),
    "rotate back, columns": UnrotateSpec(None, H32, output="rotated", masked=True, memory="columns"),
}
TARGETS = ("sm_80", "sm_90", "sm_100a", "sm_120a")
SLOW = [pytest.param(name, target, marks=pytest.mark.slow) for name in SPECS for target in TARGETS]
QUICK = [
    pytest.param(name, "sm_90") for name in ("quartet2 decoded", "quartet decoded", "signs of one unit", "rows decoded", "mask")
]


@pytest.mark.parametrize(("name", "target"), [*QUICK, *SLOW])
def test_nothing_spills_and_nothing_is_approximate(name: str, target: str) -> None:
    compiled = compile_kernel(SPECS[name], Target(target))
    assert inexact(compiled.ptx) == []
    assert (compiled.spills, compiled.stack) == (0, 0)
    assert compiled.count("STG" if not name.endswith("amax") else "RED|ATOM") > 0


@pytest.mark.parametrize("target", ["sm_89", "sm_90"])
@pytest.mark.parametrize(("dtype", "q"), [("e5m2", MXFP4()), ("e4m3", MXFP4(block=(32, 32)))], ids=str)
def test_fp8_is_the_hardwares(target: str, dtype: str, q: MXFP4) -> None:
    """A convert for every two elements of a thread, words of eight codes in, 16 bytes a store out.

    On sm_89 Triton converts by way of FP16, which holds the two significant bits of E2M1 wherever FP8 does not flush them.
    """
    spec = fp8_spec(q, dtype)
    compiled, tile = compile_kernel(spec, Target(target)), tile_of(spec, Target(target))
    elements, source = tile.rows * tile.units * 16 // (32 * tile.warps), "f16x2" if target == "sm_89" else "f32"
    assert len(re.findall(rf"cvt\.rn\.satfinite\.{dtype}x2\.{source}", compiled.ptx)) == elements // 2
    assert (compiled.spills, compiled.stack) == (0, 0)
    assert compiled.count("STG.E.128") == elements // 16
    assert inexact(compiled.ptx) == []


def test_what_is_masked_stays_in_registers() -> None:
    """Rotation, quantizer and mask of a unit are one thread's, or shuffled: shared memory sees codes at most."""
    for name in ("mask", "rotate back"):
        compiled, tile = compile_kernel(SPECS[name], Target("sm_90")), tile_of(SPECS[name], Target("sm_90"))
        assert compiled.shared <= tile.rows * tile.units * 8


def test_codes_are_read_as_words() -> None:
    """A word of eight codes a load, and as many loads of scales: an eighth of the elements a thread holds, times two.

    64 elements, and 32 where an Inf makes it careful.
    """
    spec = SPECS["quartet2 amax"]
    compiled = compile_kernel(spec, Target("sm_90"))
    assert compiled.count("LDG") <= 2 * (64 + 32) // 8 + 2  # and the seed


def second(target: str, swizzled: bool) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = build(second_source(POSTHOC, swizzled, located=False))
    types = {
        "wide_ptr": "*fp32",
        "wide_amax_ptr": "*fp32",
        "scales_ptr": "*u8",
        "tensor_scale_ptr": "*fp32",
        "seed_ptr": "*i64",
    }
    signature = {name: "constexpr" if name in ("N", "FOURS") else types.get(name, "i32") for name in kernel.arg_names}
    attributes: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs={"N": PER_PROGRAM, "FOURS": True}, attrs=attributes),
        target=GPUTarget("cuda", Target(target).capability, 32),
        options={"num_warps": 4, **COMPILE_OPTIONS},
    )
    return inspect(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("swizzled", [False, True])
def test_the_second_pass(target: str, swizzled: bool) -> None:
    compiled = second(target, swizzled)
    assert inexact(compiled.ptx) == []
    assert (compiled.spills, compiled.stack) == (0, 0)
    if not swizzled:
        assert compiled.count("LDG.E.128") > 0  # four scales a load
