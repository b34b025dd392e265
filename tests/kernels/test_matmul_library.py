"""The arguments for ``torch.nn.functional.scaled_mm`` mean the product: a stand-in that reads them as documented has it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp4.kernels import matmul_library as library
from fp4.kernels.matmul_spec import format_of
from fp4.runtime import reference
from fp4.runtime.layout import swizzle
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4, Quantizer
from tests.runtime.cases import gaussian

KIND, SWIZZLE = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
REAL = torch.nn.functional.scaled_mm
SCALE_DTYPE = {KIND.BlockWise1x16: torch.float8_e4m3fn, KIND.BlockWise1x32: torch.float8_e8m0fnu}
SIZE = {KIND.BlockWise1x16: 16, KIND.BlockWise1x32: 32}
NUMPY = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}


def values(x: Tensor) -> Tensor:
    """Bytes to FP64 values, by the tables of ml_dtypes; packed FP4 to twice the columns, the low nibble first."""
    raw = x.contiguous().view(torch.uint8).numpy()
    if x.dtype == torch.float4_e2m1fn_x2:
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)
        return torch.from_numpy(codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    return torch.from_numpy(raw.view(NUMPY[x.dtype]).astype(np.float64))


def side(matrix: Tensor, scales: list[Tensor], recipes: list[Any], swizzles: list[Any]) -> Tensor:
    """One operand, rows by contracted columns, decoded as the documentation of scaled_mm and cuBLAS's scale layout have it."""
    assert len(scales) == len(recipes) == len(swizzles)
    assert swizzles[0] is SWIZZLE.SWIZZLE_32_4_4
    assert scales[0].dtype == SCALE_DTYPE[recipes[0]]
    assert scales[0].is_contiguous()
    x = values(matrix)
    rows, columns = x.shape[0], x.shape[1] // SIZE[recipes[0]]
    flat, wide = values(scales[0]), -(-columns // 4)
    assert flat.numel() == -(-rows // 128) * 128 * wide * 4
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    at = (r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    x = x * flat[at].repeat_interleave(SIZE[recipes[0]], 1)
    if len(scales) == 2:
        assert recipes[1] is KIND.TensorWise
        assert swizzles[1] is SWIZZLE.NO_SWIZZLE
        assert scales[1].dtype == torch.float32
        x = x * scales[1].double()
    return x


def stand_in(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Any,
    scale_recipe_a: Any,
    scale_b: Any,
    scale_recipe_b: Any,
    swizzle_a: Any,
    swizzle_b: Any,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    given = dict(locals())
    assert mat_a.is_contiguous()
    assert mat_b.t().is_contiguous()
    assert len(scale_a) == len(scale_b)
    mxfp4 = scale_recipe_a[0] is KIND.BlockWise1x32 and mat_a.dtype == torch.float4_e2m1fn_x2
    assert not mxfp4 or (bias is None and output_dtype == torch.bfloat16)
    assert bias is None or (bias.dtype == output_dtype and output_dtype != torch.float32)
    meta = {
        k: torch.utils._pytree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, v) for k, v in given.items()
    }
    y = side(mat_a, scale_a, scale_recipe_a, swizzle_a) @ side(mat_b.t(), scale_b, scale_recipe_b, swizzle_b).t()
    assert REAL(**meta).shape == y.shape  # torch's own checks of the arguments
    return (y if bias is None else y + bias.double()).to(output_dtype)


PAIRS: list[tuple[Quantizer, Quantizer]] = [
    (NVFP4(), NVFP4(rounding="nearest", four_six=True)),
    (NVFP4(tensor_scale=False), NVFP4(tensor_scale=False)),
    (MXFP4(), MXFP4(scale_rule="ceil")),
    (MXFP8(), MXFP8(format="e5m2")),
]


@pytest.mark.parametrize(("qa", "qb"), PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_the_arguments_mean_the_product(
    qa: Quantizer, qb: Quantizer, dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand_in)
    m, n, k = 150, 48, 96
    a, b = gaussian(m, k) * torch.exp2(torch.arange(m) % 5 - 2.0)[:, None], gaussian(n, k, seed=1)
    bias = gaussian(n, seed=2).bfloat16() if biased else None
    (ca, sa, ta), (cb, sb, tb) = reference.quantize(a, qa), reference.quantize(b, qb)
    alphas = tuple(t if q.has_tensor_scale else None for q, t in ((qa, ta), (qb, tb)))
    names = str(format_of(qa)), str(format_of(qb))
    got = library.scaled_mm(ca, swizzle(sa), cb, swizzle(sb), names, alphas, bias, dtype)  # type: ignore[arg-type]
    decoded = [reference.dequantize(c, s, t, q, k, torch.float64) for c, s, t, q in ((ca, sa, ta, qa), (cb, sb, tb, qb))]
    want = decoded[0] @ decoded[1].t()
    want = want if bias is None else want + bias.double()
    assert got.dtype == dtype
    # A rounding to BF16 by the library, where it returns nothing else, and one at the end.
    step = 2.0**-8 if dtype == torch.bfloat16 or isinstance(qa, MXFP4) else 2.0**-23
    largest = decoded[0].abs() @ decoded[1].abs().t() + (0 if bias is None else bias.double().abs())
    assert ((got.double() - want).abs() <= 2 * step * largest).all()


def test_one_tensor_scale_alone_is_a_factor_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes both tensor scales or none."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand_in)
    q, plain = NVFP4(), NVFP4(tensor_scale=False)
    a, b = gaussian(32, 64), gaussian(16, 64, seed=1)
    (ca, sa, ta), (cb, sb, _) = reference.quantize(a, q), reference.quantize(b, plain)
    got = library.scaled_mm(ca, swizzle(sa), cb, swizzle(sb), ("nvfp4", "nvfp4"), (ta, None), None, torch.float32)
    want = reference.mm(
        reference.decode(ca, sa, q, 64, torch.float32),
        reference.decode(cb, sb, plain, 64, torch.float32),
        ta,
        None,
        torch.float32,
    )
    assert torch.equal(got, want)


def test_what_the_library_does_not_multiply_is_named() -> None:
    assert library.no_product(NVFP4(), NVFP4()) == ""
    assert "mxfp8_e4m3 by mxfp4" in library.no_product(MXFP8(), MXFP4())
    assert "e5m2 by mxfp8_e5m2" in library.no_product(MXFP8(format="e5m2"), MXFP8(format="e5m2"))
    assert "no factor" in library.no_product(MXFP4(prescale=0.75), MXFP4())
    assert "every 128" in library.no_product(NVFP4(outer=128), NVFP4())
    assert "returns BF16" in library.no_product(MXFP4(), MXFP4(), torch.float32)
    assert library.no_product(MXFP4(), MXFP4()) == library.no_product(NVFP4(), NVFP4(), torch.float32) == ""
    byte = torch.uint8
    assert library.fits(torch.empty(3, 16, dtype=byte), torch.empty(16, 16, dtype=byte))
    assert not library.fits(torch.empty(3, 24, dtype=byte), torch.empty(16, 24, dtype=byte))
    assert not library.fits(torch.empty(3, 16, dtype=byte), torch.empty(5, 16, dtype=byte))
    assert not library.fits(torch.empty(0, 16, dtype=byte), torch.empty(16, 16, dtype=byte))
