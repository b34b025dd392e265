"""Kernels compiled here, with no GPU, for every architecture: which instructions they are made of."""

from __future__ import annotations

import re

import pytest

from fp4.kernels.compile import compile_kernel
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile
from fp4.runtime.spec import MXFP4, NVFP4, Rotation

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
    KernelSpec(NVFP4(rounding="ms_eden"), H128),
    KernelSpec(MXFP4(scale_rule="quest"), Rotation(32, bf16=False)),
)
# Contracted, flushing or approximate FP32 arithmetic.
FORBIDDEN = re.compile(r"fma\.rn(?:\.ftz)?\.f32|\.ftz|\.approx|div\.full|mad\.f32")


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("spec", IN_REGISTERS + OTHERS, ids=str)
def test_arithmetic_is_ieee_and_nothing_spills(spec: KernelSpec, target: str) -> None:
    compiled = compile_kernel(spec, Target(target))
    assert FORBIDDEN.findall(compiled.ptx) == []
    assert (compiled.spills, compiled.stack) == (0, 0)
    assert compiled.count("STG") > 0
    assert compiled.count("LDG.E.128") > 0


@pytest.mark.parametrize("spec", IN_REGISTERS, ids=str)
def test_a_thread_keeps_its_blocks_in_registers(spec: KernelSpec) -> None:
    """Of one block a thread no value goes to another thread, neither for the amax nor for the butterflies."""
    compiled = compile_kernel(spec, Target("sm_90"))
    assert compiled.shared == 0
    assert compiled.count("SHFL|LDS|STS") == 0


def test_a_transpose_is_rotated_in_registers() -> None:
    compiled = compile_kernel(KernelSpec(NVFP4(), H16, memory="columns"), Target("sm_90"), Tile(64, 16, 4))
    assert compiled.count("SHFL") == 0
    assert compiled.shared == 64 * 16 * 8  # the codes alone, on their way to coalesced stores
