"""The eager face: ranks, seeds, storage, the error report, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.quantized import QuantizedTensor, quantize
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation, SpecError
from tests.runtime import cases

SR = NVFP4(rounding="stochastic")
EDEN, FRESH = NVFP4(rounding="ms_eden"), Rotation(size=128, signs="fresh")


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (2, 1, 3, 33), (0, 40), (2, 0, 16)], ids=str)
@pytest.mark.parametrize("q", [NVFP4(), NVFP4(block=(16, 16)), NVFP4(outer=32), SR, MXFP8(), FP8()], ids=str)
def test_any_rank_equals_the_flattened_call(q: Quantizer, shape: tuple[int, ...]) -> None:
    x = cases.gaussian(*shape, seed=90)
    got = quantize(x, q, seed=5, site=2)
    flat = quantize(x.reshape(-1, shape[-1]), q, seed=5, site=2)
    assert got.shape == x.shape
    assert torch.equal(got.codes, flat.codes)
    assert torch.equal(got.scales, flat.scales)
    assert got.dequantize().shape == x.shape
    assert torch.equal(got.dequantize().reshape(-1, shape[-1]), flat.dequantize())


def test_equals_the_reference() -> None:
    x = cases.gaussian(4, 50, seed=91)
    got = quantize(x, SR, seed=6, site=3)
    codes, scales, tensor_scale = reference.quantize(x, SR, None, torch.tensor([6]), 3)
    assert torch.equal(got.codes, codes)
    assert torch.equal(got.scales, scales)
    assert torch.equal(got.tensor_scale, tensor_scale)
    assert torch.equal(got.dequantize(), reference.dequantize(codes, scales, tensor_scale, SR, 50, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_kept_unless_asked_otherwise(dtype: torch.dtype) -> None:
    q = quantize(cases.gaussian(4, 50, seed=92).to(dtype), NVFP4())
    assert q.dtype == dtype
    assert q.dequantize().dtype == dtype
    assert torch.equal(q.dequantize(), q.dequantize(torch.float32).to(dtype))


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1])
def test_seed_as_number_or_tensor(seed: int) -> None:
    x = cases.gaussian(8, 64, seed=93)
    a, b = quantize(x, SR, seed=seed), quantize(x, SR, seed=torch.tensor([seed]))
    assert torch.equal(a.codes, b.codes)
    assert not torch.equal(a.codes, quantize(x, SR, seed=seed + 1).codes)
    assert not torch.equal(a.codes, quantize(x, SR, seed=seed, site=1).codes)


def test_without_a_seed_the_default_generator_decides() -> None:
    x = cases.gaussian(8, 64, seed=94)
    torch.manual_seed(0)
    a, b = quantize(x, SR), quantize(x, SR)
    torch.manual_seed(0)
    assert torch.equal(a.codes, quantize(x, SR).codes)
    assert not torch.equal(a.codes, b.codes)


def test_nearest_rounding_leaves_the_generator_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    quantize(cases.gaussian(8, 64, seed=95), NVFP4(), rotation=Rotation())
    assert torch.equal(torch.get_rng_state(), state)


def test_rotation_is_kept_and_decoded_in_its_own_space() -> None:
    x = cases.gaussian(2, 3, 40, seed=96)
    got = quantize(x, EDEN, rotation=FRESH, seed=9, site=4)
    assert got.rotation == FRESH
    rotated = reference.rotate(x.reshape(6, 40), FRESH, torch.tensor([9]), 4)
    codes, scales, tensor_scale = reference.quantize(rotated, EDEN, None, torch.tensor([9]), 4)
    assert torch.equal(got.codes, codes)
    expected = reference.dequantize(codes, scales, tensor_scale, EDEN, 128, torch.float32)
    assert torch.equal(got.dequantize(), expected.reshape(2, 3, 128))
    assert got.error(x).mse == pytest.approx((expected.double() - rotated.double()).pow(2).mean().item(), rel=1e-12)


class TestError:
    def test_exact_numbers(self) -> None:
        """Blocks with scale 1 whose elements are known: 6 is kept, 5 becomes 4, .2 becomes 0, 4.5 becomes 4."""
        x = torch.tensor([[6.0, 5.0, 0.2, 4.5] + [0.0] * 12])
        error = quantize(x, NVFP4(tensor_scale=False)).error(x)
        squared = 1.0 + float(torch.tensor(0.2).double()) ** 2 + 0.25
        norm = 36.0 + 25.0 + float(torch.tensor(0.2).double()) ** 2 + 20.25
        assert error.mse == pytest.approx(squared / 16, rel=1e-12)
        assert error.relative_mse == pytest.approx(squared / norm, rel=1e-12)
        assert error.sqnr_db == pytest.approx(10 * math.log10(norm / squared), rel=1e-12)
        assert error.underflow == 1 / 4
        assert error.saturation == 0.0
        dot, decoded = 36.0 + 20.0 + 18.0, 36.0 + 16.0 + 16.0
        assert error.cosine == pytest.approx(dot / math.sqrt(norm * decoded), rel=1e-12)

    def test_saturation_is_counted(self) -> None:
        x = torch.tensor([[7.5, -7.9, 6.0, 1.0] + [0.0] * 28])
        assert quantize(x, MXFP4()).error(x).saturation == 2 / 32
        assert quantize(x, MXFP4(scale_rule="ceil")).error(x).saturation == 0.0

    def test_of_an_exact_tensor(self) -> None:
        x = torch.tensor([[6.0, -4.0, 0.5, 0.0] * 4])
        error = quantize(x, NVFP4(tensor_scale=False)).error(x)
        assert (error.mse, error.relative_mse, error.underflow, error.saturation) == (0.0, 0.0, 0.0, 0.0)
        assert error.sqnr_db == math.inf
        assert error.cosine == 1.0

    @pytest.mark.parametrize("x", [torch.zeros(3, 16), torch.zeros(0, 16)])
    def test_of_zeros_and_of_nothing(self, x: torch.Tensor) -> None:
        error = quantize(x, NVFP4()).error(x)
        assert (error.mse, error.relative_mse, error.underflow, error.saturation) == (0.0, 0.0, 0.0, 0.0)

    def test_nan_shows(self) -> None:
        x = cases.DATA["poisoned"]()
        error = quantize(x, NVFP4()).error(x)
        assert math.isnan(error.mse)
        assert math.isnan(error.relative_mse)

    def test_another_shape_is_refused(self) -> None:
        with pytest.raises(ValueError, match="pass the same tensor"):
            quantize(torch.ones(2, 16), NVFP4()).error(torch.ones(16))


@pytest.mark.parametrize(
    ("q", "bits"),
    [
        (NVFP4(), 4.5),
        (NVFP4(block=(16, 16)), 4 + 8 / 256),
        (MXFP4(), 4.25),
        (MXFP8(), 8.25),
        (FP8(), 8 + 32 / 128),
        (NVFP4(outer=128), 4.75),
    ],
    ids=str,
)
def test_bits_per_element(q: Quantizer, bits: float) -> None:
    got = quantize(torch.ones(256, 512), q)
    assert got.bits_per_element == q.bits_per_element == bits
    assert got.nbytes == int(256 * 512 * bits) // 8 + (0 if q.has_outer_scale else 4)


def test_padding_counts() -> None:
    got = quantize(torch.ones(1, 17), NVFP4())
    assert got.nbytes == 16 + 2 + 4
    assert got.bits_per_element == 8 * 18 / 17


def test_is_frozen() -> None:
    got: QuantizedTensor = quantize(torch.ones(16), NVFP4())
    with pytest.raises(AttributeError):
        setattr(got, "site", 1)  # noqa: B010  (written as an assignment, mypy would refuse it)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"bfloat16, float16 or float32, e\.g\. x\.float\(\)"):
        quantize(torch.ones(4, 16).to(dtype), NVFP4())


def test_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x\.reshape\(1\)"):
        quantize(torch.tensor(1.0), NVFP4())


@pytest.mark.parametrize("rotation", [None, Rotation(), Rotation(size=128, signs="fixed")])
def test_ms_eden_without_fresh_signs_is_refused(rotation: Rotation | None) -> None:
    with pytest.raises(SpecError, match=r"Write rotation=Rotation\(size=128, signs='fresh'\)"):
        quantize(torch.ones(4, 128), EDEN, rotation=rotation, seed=0)


@pytest.mark.parametrize("seed", [torch.tensor([1, 2]), torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32)])
def test_other_seeds_are_refused(seed: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="pass an integer or one int64 element"):
        quantize(torch.ones(4, 16), SR, seed=seed)
