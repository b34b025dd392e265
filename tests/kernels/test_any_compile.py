"""Hypothesis draws the specification space: whatever is allowed compiles without local memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fp4.kernels.codegen import source
from fp4.kernels.compile import candidate
from fp4.kernels.inspection import judged
from fp4.kernels.kernelspec import INPUTS, KernelSpec
from fp4.kernels.target import TARGETS, Target, TargetError
from fp4.runtime.spec import SpecError
from tests.kernels.equality import supported
from tests.runtime.strategies import quantizers, rotations


@st.composite
def kernel_specs(draw: st.DrawFn) -> KernelSpec:
    """Any specification that is not refused."""
    output = draw(st.sampled_from(["packed", "packed", "decoded", "decoded", "rotated", "amax"]))
    try:
        return KernelSpec(
            draw(quantizers().filter(supported)) if output in ("packed", "decoded") else None,
            draw(rotations() if output == "rotated" else st.none() | rotations()),
            output=output,
            dtype=draw(st.sampled_from(["bf16", "fp32", "e4m3", "e5m2"])),
            scaled=draw(st.booleans()),
            memory=draw(st.sampled_from(["rows", "columns"])),
            input=draw(st.sampled_from(INPUTS)),
            aligned=draw(st.booleans()),
            scale_layout=draw(st.sampled_from(["plain", "swizzled"])),
            native_draws=draw(st.booleans()),
            located=draw(st.booleans()),
        )
    except SpecError:
        assume(False)
        raise


def sourced(spec: KernelSpec, target: Target) -> str:
    """The source, where the target can do what is asked."""
    try:
        return source(spec, target)
    except TargetError:
        assume(False)
        raise


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(kernel_specs(), st.sampled_from(TARGETS))
def test_any_source_is_whole_and_the_same_each_time(spec: KernelSpec, name: str) -> None:
    target = Target(name)
    text = sourced(spec, target)
    compile(text, "kernel", "exec")
    assert text == source(spec, target)
    assert ("cvt.rn.satfinite.e2m1x2.f32" in text) == (
        "FP4 converts" in candidate(spec, target).needs and not spec.native_draws
    )
    assert ("cvt.rs.satfinite.e2m1x4.f32" in text) == spec.native_draws


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(kernel_specs(), st.sampled_from(["sm_80", "sm_90", "sm_100a", "sm_120a"]))
def test_any_specification_compiles_without_local_memory(spec: KernelSpec, name: str) -> None:
    target, q = Target(name), spec.quantizer
    assume(q is None or q.rounding != "ms_eden" or spec.rotation is not None)  # which the policy asks for
    sourced(spec, target)
    kernel = candidate(spec, target)
    assert judged(kernel, target, kernel.compile(target)).faults == ()
