"""The kernels of both orientations, compiled here with no GPU and inspected."""

from __future__ import annotations

import pytest

from fp4.kernels.both import BothSpec, tile_of
from fp4.kernels.compile import compile_both
from fp4.kernels.inspection import TO_FP4
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.runtime.spec import MXFP4, NVFP4, Rotation
from tests.kernels.test_compile import inexact

H16, H32, H128 = Rotation(16, signs="fixed"), Rotation(32, bf16=False), Rotation(128, signs="fresh", bf16=False)
SR, EDEN, SIX = NVFP4(rounding="stochastic", range_guard=True), NVFP4(rounding="ms_eden"), NVFP4(four_six=True)
EVEN, QUEST = MXFP4(scale_rule="even"), MXFP4(scale_rule="quest")
SPECS = {
    "nearest": BothSpec(KernelSpec(NVFP4()), KernelSpec(NVFP4(), memory="columns")),
    "X of nvfp4": BothSpec(KernelSpec(NVFP4(), output="decoded"), KernelSpec(NVFP4(), H16, memory="columns")),
    "dY of nvfp4": BothSpec(KernelSpec(SR, output="decoded"), KernelSpec(SR, H16, memory="columns", output="decoded")),
    "mxfp4_h16": BothSpec(KernelSpec(EVEN, H16), KernelSpec(EVEN, H16, memory="columns")),
    "quartet": BothSpec(KernelSpec(QUEST, H32), KernelSpec(MXFP4(scale_rule="range_fit"), H32, memory="columns")),
    "four_six and ms_eden": BothSpec(KernelSpec(SIX, output="decoded"), KernelSpec(EDEN, H128, memory="columns")),
    "ms_eden and four_six": BothSpec(KernelSpec(EDEN, H128), KernelSpec(SIX, memory="columns")),
}
TARGETS = ("sm_80", "sm_90", "sm_100a", "sm_120a")
QUICK = [pytest.param("nearest", "sm_90"), pytest.param("dY of nvfp4", "sm_100a")]
SLOW = [pytest.param(name, target, marks=pytest.mark.slow) for name in SPECS for target in TARGETS]


@pytest.mark.parametrize(("name", "target"), [*QUICK, *SLOW])
def test_nothing_spills_and_nothing_is_approximate(name: str, target: str) -> None:
    compiled = compile_both(SPECS[name], Target(target))
    assert inexact(compiled.ptx) == []
    assert (compiled.spills, compiled.stack) == (0, 0)
    assert compiled.count("STG") > 0


def test_both_round_natively() -> None:
    """Two converts, one an orientation, for every two elements of a thread."""
    spec, target = SPECS["nearest"], Target("sm_100a")
    tile = tile_of(spec)
    elements = tile.rows * tile.units * 16 // (32 * tile.warps)
    compiled = compile_both(spec, target)
    assert compiled.ptx.count("cvt.rn.satfinite.e2m1x2.f32") == elements
    assert compiled.count(TO_FP4) > 0
