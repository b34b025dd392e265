"""The clip mask of the straight-through estimator: exact comparison, bit order, padding, and zeros where a bit is 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4, Quantizer, SpecError
from tests.runtime import cases
from tests.runtime import oracle_numpy as oracle

QUEST = MXFP4(scale_rule="quest")
MASKED = (QUEST, MXFP4(), MXFP4(scale_rule="even", block=(32, 32)), MXFP4(scale_rule="ceil"), MXFP4(scale_rule="range_fit"))


def _bits(mask: torch.Tensor) -> torch.Tensor:
    """(R, n) bytes to (R, 8n) of 0 and 1, the low bit first."""
    return torch.from_numpy(np.unpackbits(mask.numpy(), axis=1, bitorder="little"))


def _mask(x: torch.Tensor, q: Quantizer) -> torch.Tensor:
    return reference.clip_mask(x, reference.quantize(x, q)[1], q)


def _check(x: torch.Tensor, q: MXFP4) -> None:
    with np.errstate(all="ignore"):
        scale_bytes = oracle.quantize(x.float().numpy(), q).scale_bytes
        assert scale_bytes is not None
        expected = oracle.clip_mask(x.float().numpy(), scale_bytes, (q.block[0], q.block[1]))
    got = _mask(x, q)
    assert got.dtype == torch.uint8
    assert got.shape == (x.shape[0], -(-x.shape[1] // 32) * 4)
    assert torch.equal(_bits(got), torch.from_numpy(expected).to(torch.uint8))


@pytest.mark.parametrize("data", cases.DATA)
@pytest.mark.parametrize("q", MASKED, ids=str)
def test_equals_the_comparison_in_float64(q: MXFP4, data: str) -> None:
    _check(cases.DATA[data](), q)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("q", MASKED, ids=str)
def test_odd_shapes(q: MXFP4, shape: tuple[int, int]) -> None:
    _check(cases.gaussian(*shape, seed=60), q)


def test_six_itself_is_clipped() -> None:
    """The bound is strict, on both signs, and holds at every scale."""
    for exponent in (-126, -20, 0, 20, 124):
        six = torch.tensor(6.0 * 2.0**exponent)
        below, above = torch.nextafter(six, torch.tensor(0.0)), torch.nextafter(six, torch.tensor(torch.inf))
        x = torch.zeros(1, 32)
        x[0, :6] = torch.stack([six, -six, below, -below, above, -above])
        scales = torch.full((1, 1), 127 + exponent, dtype=torch.uint8)
        assert _bits(reference.clip_mask(x, scales, QUEST))[0].tolist() == [0, 0, 1, 1, 0, 0] + [1] * 26


def test_bit_j_of_byte_i_is_element_8i_plus_j() -> None:
    x = torch.zeros(2, 40)
    x[0, 0] = x[0, 11] = x[1, 39] = 100.0
    mask = reference.clip_mask(x, torch.full((2, 2), 127, dtype=torch.uint8), QUEST)
    assert mask.tolist() == [[0xFE, 0xF7] + [0xFF] * 6, [0xFF] * 4 + [0x7F] + [0xFF] * 3]


def test_quest_clips_outliers_and_little_else() -> None:
    """The scale follows the standard deviation: 2^E is within (.5, 1] * .487 sigma, so 6 * 2^E is 1.46 to 2.92 sigma."""
    x = cases.gaussian(64, 320, seed=61)
    x[:, 7] = 40.0
    bits = _bits(_mask(x, QUEST)).bool()
    assert not bits[:, 7].any()
    sigma = x[:, 32:].reshape(64, 9, 32).std(2, correction=0).repeat_interleave(32, 1)
    assert bits[:, 32:][x[:, 32:].abs() < 1.46 * sigma].all()
    assert not bits[:, 32:][x[:, 32:].abs() > 2.93 * sigma].any()


def test_nan_infinity_and_their_blocks_have_no_bits() -> None:
    x = torch.zeros(3, 64)
    x[1, 3], x[2, 40] = float("nan"), -float("inf")
    bits = _bits(_mask(x, QUEST))
    assert bits[0].all()
    assert bits[1].tolist() == [0] * 32 + [1] * 32
    assert bits[2].tolist() == [1] * 32 + [0] * 32


def test_transposed_operand() -> None:
    x = cases.gaussian(70, 50, seed=62)
    assert torch.equal(_mask(x.t(), QUEST), _mask(x.t().contiguous(), QUEST))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [64, 50, 33, 1, 0])
def test_apply_mask(columns: int, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (7, 64), generator=torch.Generator().manual_seed(63), dtype=torch.uint8)
    mask = torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    y = cases.gaussian(7, columns, seed=64).to(dtype)
    expected = torch.where(bits[:, :columns].bool(), y, torch.zeros(7, columns, dtype=dtype))
    assert cases.same_bits(reference.apply_mask(y, mask), expected)
    assert cases.same_bits(reference.apply_mask(y.t().contiguous().t(), mask), expected)


def test_apply_mask_drops_nan() -> None:
    y = torch.full((1, 8), float("nan"))
    assert reference.apply_mask(y, torch.zeros(1, 4, dtype=torch.uint8)).tolist() == [[0.0] * 8]


def test_apply_mask_of_nothing() -> None:
    assert reference.apply_mask(torch.ones(0, 40), torch.zeros(0, 8, dtype=torch.uint8)).shape == (0, 40)


@pytest.mark.parametrize("q", [NVFP4(), MXFP8(), MXFP4(prescale=0.75)], ids=str)
def test_other_quantizers_are_refused(q: Quantizer) -> None:
    with pytest.raises(SpecError, match=r"clip_mask: .* is not MXFP4 of prescale 1.*Write MXFP4\(\)"):
        reference.clip_mask(torch.ones(1, 32), torch.zeros(1, 1, dtype=torch.uint8), q)
