"""Kernels that read codes equal the oracle's decode, transpose, rotate, quantize, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4.kernels.packed import PackedSpec, readable
from fp4.kernels.requantize import Packed
from fp4.runtime import reference
from fp4.runtime.spec import FP8, NVFP4, Quantizer, Rotation, SpecError
from tests.kernels.equality import supported
from tests.kernels.requantizing import CASES, RECIPES, differences
from tests.runtime.cases import DATA, SHAPES, gaussian
from tests.runtime.strategies import operands, quantizers, rotations

SEED, SITE = torch.tensor([5]), 3


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("source", "q", "rotation"), CASES, ids=str)
def test_every_part(source: Quantizer, q: Quantizer, rotation: Rotation | None, transposed: bool) -> None:
    x = DATA["outliers"]()
    assert differences(x, source, q, rotation, SEED, SITE, transposed=transposed, scaled=not transposed) == []


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("source", "q", "rotation"), RECIPES, ids=str)
def test_operands_of_the_recipes(source: Quantizer, q: Quantizer, rotation: Rotation | None, data: str) -> None:
    assert differences(DATA[data](), source, q, rotation, SEED, SITE, brief=True) == []


@pytest.mark.parametrize("shape", [*SHAPES, (40, 0), (130, 8), (8, 130)], ids=str)
@pytest.mark.parametrize(("source", "q", "rotation"), [*CASES[:4], CASES[5]], ids=str)
def test_shapes(source: Quantizer, q: Quantizer, rotation: Rotation | None, shape: tuple[int, int]) -> None:
    for transposed in (True, False):
        found = differences(gaussian(*shape), source, q, rotation, SEED, SITE, transposed=transposed, brief=not transposed)
        assert found == []


def test_codes_of_a_strided_copy() -> None:
    """Codes and scales that are views of wider tensors are read as their contiguous copies."""
    from fp4.kernels import requantize as kernels

    x = gaussian(48, 64)
    codes, scales, _ = reference.quantize(x, NVFP4())
    wide = torch.zeros(48, 35, dtype=torch.uint8)
    wide[:, 2:34] = codes
    for given_codes in (wide[:, 2:34], codes.t().contiguous().t()):
        got = kernels.requantize(Packed(given_codes, scales, None, NVFP4(), 64), NVFP4())
        want = reference.quantize(reference.decode(codes, scales, NVFP4(), 64, torch.bfloat16).t(), NVFP4())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_source_that_is_not_packed_is_an_error() -> None:
    empty = torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(SpecError, match="packed E2M1"):
        Packed(empty, empty, None, FP8(), 0)
    with pytest.raises(SpecError, match="packed E2M1"):
        PackedSpec(NVFP4(), source=FP8())
    with pytest.raises(TypeError, match="bfloat16 or torch.float32"):
        Packed(empty, empty, None, NVFP4(), 0, torch.float16)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    quantizers().filter(lambda q: readable(q) and supported(q)),
    quantizers().filter(supported),
    st.none() | rotations(),
    operands(),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_any_specification(
    source: Quantizer, q: Quantizer, rotation: Rotation | None, x: torch.Tensor, seed: int, transposed: bool
) -> None:
    assert differences(x, source, q, rotation, torch.tensor([seed]), seed >> 3, transposed=transposed, brief=True) == []
