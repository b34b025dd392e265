"""Element and scale formats, exhaustively: the tables of the numpy oracle against ml_dtypes, and the product against both."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4.runtime import formats, reference
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer
from tests.runtime import cases
from tests.runtime import oracle_numpy as oracle

FLT_MAX = np.finfo(np.float32).max
# Elements are reached through a quantizer whose scale is exactly 1 for a block with this maximum in it.
UNIT_SCALE: dict[str, tuple[Quantizer, float]] = {
    "e2m1": (NVFP4(tensor_scale=False), 6.0),
    "e4m3": (FP8(block=(1, 32)), 448.0),
    "e5m2": (FP8(format="e5m2", block=(1, 32)), 57344.0),
}


def _neighbours(x: np.ndarray) -> np.ndarray:
    """x and its two FP32 neighbours."""
    x = x.astype(np.float32)
    return np.concatenate([np.nextafter(x, np.float32(-np.inf)), x, np.nextafter(x, np.float32(np.inf))])


def _critical_points(fmt: str) -> np.ndarray:
    """Every value, every midpoint of two adjacent ones, and the FP32 neighbours of all these."""
    values = oracle.table(fmt)
    middles = (values[1:] + values[:-1]) / 2
    return _neighbours(np.concatenate([values, middles]))


def _codes_under_unit_scale(magnitudes: np.ndarray, fmt: str) -> np.ndarray:
    """Codes that the product gives: one element a block, beside the block maximum that makes the scale 1."""
    q, largest = UNIT_SCALE[fmt]
    width = q.block[1]
    x = torch.zeros(len(magnitudes), width)
    x[:, 0], x[:, 1] = torch.from_numpy(magnitudes), largest
    codes, scales, _ = reference.quantize(x, q)
    assert (reference.decode(codes, scales, q, width, torch.float32)[:, 1] == largest).all()
    return (cases.unpack(codes) if q.packed else codes)[:, 0].numpy()


@pytest.mark.parametrize("fmt", ["e2m1", "e4m3", "e5m2"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_elements_round_as_ml_dtypes(fmt: str, sign: float) -> None:
    points = np.float32(sign) * np.clip(_critical_points(fmt), 0, UNIT_SCALE[fmt][1]).astype(np.float32)
    expected = points.astype(oracle.ML_DTYPES[fmt]).view(np.uint8)
    assert np.array_equal(_codes_under_unit_scale(points, fmt), expected)
    assert np.array_equal(oracle.element_code(points, fmt), expected)


@pytest.mark.parametrize("fmt", ["e2m1", "e4m3", "e5m2"])
def test_every_code_decodes_as_ml_dtypes(fmt: str) -> None:
    """All finite codes, both signs, in one row; the block scale is 1."""
    q, _ = UNIT_SCALE[fmt]
    count = 16 if fmt == "e2m1" else 256
    codes = np.arange(count, dtype=np.uint8)
    expected = codes.view(oracle.ML_DTYPES[fmt]).astype(np.float32)
    finite = np.isfinite(expected)
    stored = torch.from_numpy(oracle.pack(codes[None]) if fmt == "e2m1" else codes[None])
    blocks = count // q.block[1] if fmt != "e2m1" else 1
    scales = torch.ones(1, blocks) if fmt != "e2m1" else torch.full((1, blocks), 0x38, dtype=torch.uint8)
    got = reference.decode(stored, scales, q, count, torch.float32)[0].numpy()
    assert np.array_equal(got[finite], expected[finite])
    assert np.array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (1.8, 2.0),
        (3.6, 4.0),
    ],
)
def test_e2m1_ties_and_carries(value: float, expected: float) -> None:
    for sign in (1.0, -1.0):
        code = _codes_under_unit_scale(np.array([sign * value], np.float32), "e2m1")
        assert code.view(ml_dtypes.float4_e2m1fn).astype(np.float32)[0] == sign * expected


def test_e2m1_saturates() -> None:
    """A scale set by a small tensor amax: every larger element becomes 6, infinity excepted (its block is NaN)."""
    x = torch.tensor([[7.0, 1e4, cases.FLT_MAX, -7.0, -1e30, 5.0, 4.9, 0.0] * 2])
    codes, _, _ = reference.quantize(x, NVFP4(), amax=torch.tensor(6.0))
    assert cases.unpack(codes)[0, :5].tolist() == [7, 7, 7, 15, 15]


@pytest.mark.parametrize("scale", formats.SCALE_FORMATS)
def test_scale_rounds_to_nearest(scale: str) -> None:
    """Every value, midpoint and neighbour of the block scale's format; ours beside the table search and ml_dtypes.

    With the amax at max/6 of the block scales' range, the encoding factor is 6, times 1/6 it is exactly 1: the block maximum
    itself is what is rounded.
    """
    largest = np.float32(oracle.table(scale)[-1])
    points = np.concatenate([_critical_points(scale), np.array([largest * 1.5, 1e30, FLT_MAX], np.float32)]).clip(0, FLT_MAX)
    x = torch.zeros(len(points), 16)
    if scale == "e8m0":  # it has no tensor scale: six times the wanted value goes in, and comes back by a product with 1/6
        sixfold = (points.astype(np.float64) * 6).clip(0, FLT_MAX).astype(np.float32)
        x[:, 3], points = torch.from_numpy(sixfold), sixfold * np.float32(1 / 6)
        assert np.isin(1.5 * 2.0 ** np.arange(-126, 124), points).all()
        _, got, _ = reference.quantize(x, NVFP4(scale=scale, tensor_scale=False))
    else:
        x[:, 3] = torch.from_numpy(points)
        _, got, tensor_scale = reference.quantize(x, NVFP4(scale=scale), torch.tensor(largest))
        assert tensor_scale == torch.tensor(1.0) / 6
    expected = oracle.nearest_code(points, scale)
    assert np.array_equal(got[:, 0].numpy(), expected)
    if scale in oracle.ML_DTYPES:
        # ml_dtypes makes a zero in e8m0 a NaN, and does not round denormals to the nearer of 2^-127 and 2^-126.
        there = points >= (2.0**-126 if scale == "e8m0" else 0)
        theirs = points[there].clip(0, largest).astype(oracle.ML_DTYPES[scale]).view(np.uint8)
        assert np.array_equal(expected[there], theirs)


@pytest.mark.parametrize("scale", formats.SCALE_FORMATS)
def test_every_scale_byte_decodes(scale: str) -> None:
    q = NVFP4(scale=scale, tensor_scale=False)
    values = oracle.table(scale)
    one = torch.full((len(values) + 1, 8), 0x22, dtype=torch.uint8)  # two codes of the value 1
    scales = torch.arange(len(values) + 1, dtype=torch.int32).to(torch.uint8)[:, None]
    scales[-1] = oracle.NAN_BYTE[scale]
    got = reference.decode(one, scales, q, 16, torch.float32)
    assert np.array_equal(got[:-1, 0].numpy(), values.astype(np.float32))
    assert got[-1].isnan().all()
    if scale in oracle.ML_DTYPES:
        assert np.array_equal(scales[:-1, 0].numpy().view(oracle.ML_DTYPES[scale]).astype(np.float64), values)


@pytest.mark.parametrize("scale", formats.SCALE_FORMATS)
def test_scale_format_table(scale: str) -> None:
    exponent, mantissa, bias, largest = formats.SCALE_FORMATS[scale]
    assert largest == oracle.table(scale)[-1]
    assert bias == 2 ** (exponent - 1) - 1
    assert (f"e{exponent}m{mantissa}") == scale.removeprefix("u")


@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127), (255, float("nan"))])
def test_e8m0_bytes(byte: int, value: float) -> None:
    for q in (MXFP4(), MXFP8()):
        codes = torch.full((1, 16), 0x22, dtype=torch.uint8) if q.packed else torch.full((1, 32), 0x38, dtype=torch.uint8)
        got = reference.decode(codes, torch.tensor([[byte]], dtype=torch.uint8), q, 32, torch.float32)
        assert cases.same_bits(got, torch.full((1, 32), value))


def test_constants() -> None:
    assert tuple(oracle.table("e2m1")) == formats.E2M1_VALUES
    assert oracle.table("e2m1")[-1] == formats.E2M1_MAX
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max) == formats.E4M3_MAX
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e5m2).max) == formats.E5M2_MAX
    assert float(np.finfo(np.float32).max) == formats.FLT_MAX
