"""TransformerEngine#3281, #3217: stochastic rounding built for an architecture without ``cvt.rs`` wrote zeros.

Here it draws and rounds in ordinary instructions there (equal to the oracle: ``tests/kernels``), and refuses by name what an
architecture cannot do.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from fp4.kernels.codegen import source
from fp4.kernels.compile import compile_kernel
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target, TargetError
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120a"])
@pytest.mark.parametrize("q", [NVFP4(rounding="stochastic"), MXFP4(rounding="stochastic", scale_rule="ceil")], ids=str)
def test_it_rounds_without_the_instruction(q: Quantizer, target: str) -> None:
    compiled = compile_kernel(KernelSpec(q), Target(target))
    assert "cvt.rs" not in compiled.ptx
    assert "st.global" in compiled.ptx
    assert compiled.ptx.count("mul.wide.u32") + compiled.ptx.count("mul.hi.u32") >= 10  # Philox, ten rounds


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120a", "sm_121a"])
def test_the_instruction_is_refused_where_there_is_none(target: str) -> None:
    with pytest.raises(TargetError, match=f"{target} has no cvt.rs"):
        source(KernelSpec(NVFP4(rounding="stochastic"), native_draws=True), Target(target))


@pytest.mark.parametrize("target", ["sm_70", "sm_100", "gfx950", ""])
def test_an_unknown_architecture_is_refused(target: str) -> None:
    with pytest.raises(TargetError, match="write one of sm_80"):
        Target(target)
