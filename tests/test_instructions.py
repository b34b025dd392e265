"""``benchmarks.instructions`` counts what is between a branch back and its target."""

from __future__ import annotations

from benchmarks.instructions import loop, moved
from fp4.kernels.kernelspec import KernelSpec
from fp4.runtime.spec import MXFP4, NVFP4

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   FADD R2, R3, R4 ;
        /*0020*/               @P0 BRA 0x40 ;
        /*0030*/                   FMUL R2, R2, R2 ;
        /*0040*/              @!P1 BRA 0x10 ;
        /*0050*/                   EXIT ;
        /*0060*/                   BRA 0x60 ;
"""


def test_a_loop_is_from_its_target_to_its_branch() -> None:
    assert loop(SASS) == 4
    assert loop(SASS.replace("0x10 ;", "0x50 ;")) == 1  # what follows a kernel's end


def test_bytes_that_must_move() -> None:
    assert moved(KernelSpec(NVFP4())) == 2 + 0.5 + 1 / 16
    assert moved(KernelSpec(MXFP4())) == 2 + 0.5 + 1 / 32
    assert moved(KernelSpec(NVFP4(), output="decoded")) == 4
    assert moved(KernelSpec(None, output="amax")) == 2
