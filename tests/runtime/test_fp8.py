"""MXFP4 operands as FP8 tensors: exact within the reach, for every code and every scale, and counted outside."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4.runtime import fp8, reference
from fp4.runtime.formats import E2M1_VALUES
from fp4.runtime.layout import pack
from fp4.runtime.spec import FP8, MXFP4, NVFP4

NUMPY = {torch.float8_e5m2: ml_dtypes.float8_e5m2, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
FORMATS = list(fp8.REACH)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_reach_is_all_there_is(dtype: torch.dtype) -> None:
    """By an independent FP8: within the reach every code is exact, one step outside on either side some code is not."""
    reach = fp8.REACH[dtype]
    values = np.array(E2M1_VALUES)

    def exact(exponent: int) -> bool:
        scaled = values * 2.0**exponent
        with np.errstate(over="ignore"):
            return bool((scaled.astype(NUMPY[dtype]).astype(np.float64) == scaled).all())

    assert all(exact(e) for e in range(reach.least, reach.most + 1))
    assert not exact(reach.least - 1)
    assert not exact(reach.most + 1)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("top", [0, 3, 30, 127, 254])
def test_every_code_of_every_scale(dtype: torch.dtype, top: int) -> None:
    """A block a scale code up to the tensor's largest, each with all sixteen codes twice; and a block that is NaN."""
    reach, q = fp8.REACH[dtype], MXFP4()
    exponents = [*range(top + 1), 255]
    scales = torch.tensor(exponents, dtype=torch.uint8)[:, None]
    codes = pack(torch.arange(16).repeat(2).repeat(len(exponents), 1).to(torch.uint8))
    assert fp8.top_scale(scales) == top
    values, factor, outside = fp8.operand(codes, scales, fp8.top_scale(scales), q, dtype)
    assert values.dtype == dtype
    assert torch.frexp(factor).mantissa == 0.5
    assert factor >= 2.0**-126
    got = values.double() * factor.double()
    signed = np.array([*E2M1_VALUES, *(-v for v in E2M1_VALUES)] * 2)
    want = torch.from_numpy(signed * 2.0 ** (np.array(exponents)[:, None] - 127))  # FP64: FP32 overflows at the last scales
    assert got[-1].isnan().all()
    low = min(top, max(0, max(top, reach.most + 1) - reach.most + reach.least))  # the first scale within the reach
    assert torch.equal(got[low:-1], want[low:-1])
    for i in range(low):
        rounded = (signed * 2.0 ** max(-127, i - max(top, reach.most + 1) + reach.most)).astype(NUMPY[dtype])
        assert np.array_equal(values[i].float().numpy(), rounded.astype(np.float32))
    assert outside == 28 * low  # 14 nonzero codes, twice


@pytest.mark.parametrize("rows", [32, 40])
def test_square_blocks(rows: int) -> None:
    q = MXFP4(block=(32, 32))
    x = torch.randn(rows, 70, generator=torch.Generator().manual_seed(0))
    codes, scales, _ = reference.quantize(x, q)
    values, factor, outside = fp8.operand(codes, scales, fp8.top_scale(scales), q, torch.float8_e4m3fn)
    assert values.shape == (rows, 96)
    assert torch.equal((values.float() * factor)[:, :70], reference.decode(codes, scales, q, 70, torch.float32))
    assert outside == 0


def test_a_larger_top_leaves_values_exact() -> None:
    """Of the whole tensor's top, a part of it is exact too."""
    q = MXFP4()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    codes, scales, _ = reference.quantize(x, q)
    for more in range(8):
        values, factor, outside = fp8.operand(codes, scales, fp8.top_scale(scales) + more, q, torch.float8_e5m2)
        assert torch.equal(values.float() * factor, reference.decode(codes, scales, q, 64, torch.float32))
        assert outside == 0


def test_no_rows() -> None:
    scales = torch.zeros(0, 2, dtype=torch.uint8)
    values, _, outside = fp8.operand(torch.zeros(0, 32, dtype=torch.uint8), scales, fp8.top_scale(scales), MXFP4(), FORMATS[0])
    assert values.shape == (0, 64)
    assert outside == 0


def test_a_product_is_the_exact_operands() -> None:
    q = MXFP4(scale_rule="range_fit")
    generator = torch.Generator().manual_seed(0)
    operands = []
    wanted = []
    for dtype, rows in zip(fp8.FORMATS, (5, 7), strict=True):
        codes, scales, _ = reference.quantize(torch.randn(rows, 64, generator=generator), q)
        operands.append(fp8.operand(codes, scales, fp8.top_scale(scales), q, dtype))
        wanted.append(reference.decode(codes, scales, q, 64, torch.bfloat16))
    (a, a_factor, _), (b, b_factor, _) = operands
    alpha, bias = torch.tensor(1 / 9), torch.randn(7, generator=generator)
    got = fp8.mm(a, b, a_factor, b_factor, alpha, bias, torch.float32)
    want = reference.mm(wanted[0], wanted[1], alpha, bias, torch.float32)
    assert torch.equal(got, want)


def test_what_is_not_exact_says_so() -> None:
    assert fp8.inexact(MXFP4(), MXFP4(block=(32, 32))) == ""
    assert "not exact" in fp8.inexact(MXFP4(), NVFP4())
    assert "not exact" in fp8.inexact(FP8(), MXFP4())
    assert "not quantized" in fp8.inexact(MXFP4(), None)
