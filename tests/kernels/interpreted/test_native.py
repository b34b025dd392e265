"""Kernels for Blackwell's conversion instructions, the instructions modelled by arithmetic, equal the oracle bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4.kernels import launch
from fp4.kernels import quantize as kernels
from fp4.kernels.target import Target, TargetError
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation
from tests.kernels import masking, requantizing
from tests.kernels.equality import differences, supported
from tests.runtime.cases import DATA, SHAPES, gaussian
from tests.runtime.strategies import operands, quantizers, rotations

SEED, SITE = torch.tensor([5]), 3
BLACKWELL = Target("interpreter", models="sm_100a")
QUANTIZERS = (
    NVFP4(),
    NVFP4(block=(1, 8)),
    NVFP4(block=(16, 16), four_six=True),
    NVFP4(four_six=True),
    NVFP4(rounding="ms_eden"),
    NVFP4(rounding="ms_eden", posthoc=True),
    NVFP4(outer=128),
    MXFP4(),
)
DRAWN = (
    NVFP4(rounding="stochastic"),
    NVFP4(rounding="stochastic", block=(1, 8)),
    NVFP4(rounding="stochastic", block=(16, 16)),
    MXFP4(rounding="stochastic", scale_rule="ceil"),
)


@pytest.fixture(autouse=True)
def _as_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "target_of", lambda device: BLACKWELL)
    monkeypatch.setattr(launch, "PLANS", {})


@pytest.mark.parametrize("q", QUANTIZERS, ids=str)
@pytest.mark.parametrize("data", ["midpoints", "quarter_grid", "poisoned", "denormals", "negative_zero", "huge", "wide"])
def test_nearest_is_the_same_bytes(q: Quantizer, data: str) -> None:
    assert differences(DATA[data](), q, None, SEED, SITE, brief=data != "midpoints") == []


@pytest.mark.parametrize("q", DRAWN, ids=str)
@pytest.mark.parametrize("data", ["midpoints", "gaussian", "poisoned", "denormals", "wide"])
def test_the_instruction_s_own_draws(q: Quantizer, data: str) -> None:
    assert differences(DATA[data](), q, None, SEED, SITE, brief=data != "gaussian", native_draws=True) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    for y, q in ((x, DRAWN[0]), (x.t().contiguous().t(), DRAWN[1])):
        assert differences(y, q, Rotation(16, signs="fixed"), SEED, SITE, brief=True, native_draws=True) == []


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(quantizers().filter(supported), st.none() | rotations(), operands(), st.integers(0, 2**32 - 1), st.booleans())
def test_any_specification(q: Quantizer, rotation: Rotation | None, x: torch.Tensor, seed: int, drawn: bool) -> None:
    drawn = drawn and q.rounding == "stochastic"
    assert differences(x, q, rotation, torch.tensor([seed]), seed >> 3, brief=True, native_draws=drawn) == []


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("q", DRAWN[:1] + DRAWN[2:], ids=str)
def test_draws_for_what_is_read_from_codes(q: Quantizer, transposed: bool) -> None:
    for rotation in (None, Rotation(16, signs="fixed")):
        for x in (gaussian(48, 96), gaussian(33, 40)):
            how: dict[str, Any] = {"transposed": transposed, "brief": rotation is None, "native_draws": True}
            assert requantizing.differences(x, NVFP4(), q, rotation, SEED, SITE, **how) == []


def test_draws_beside_the_clip_mask() -> None:
    q = MXFP4(rounding="stochastic", scale_rule="range_fit")
    for rotation in (None, Rotation(32, bf16=False)):
        for x in (gaussian(33, 96), gaussian(64, 40).t()):
            found = masking.quantize_differences(x, q, rotation, SEED, SITE, native_draws=True)
            assert found == []


def test_a_target_without_the_instruction_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (Target("interpreter"), Target("interpreter", models="sm_120a")):
        monkeypatch.setattr(kernels, "target_of", lambda device, target=target: target)
        with pytest.raises(TargetError, match="no cvt.rs.satfinite.e2m1x4"):
            kernels.quantize(gaussian(4, 16), NVFP4(rounding="stochastic"), seed=SEED, native_draws=True)
