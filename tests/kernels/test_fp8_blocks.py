"""The arguments of ``scaled_mm`` for FP8 in blocks mean the product: a stand-in that reads memory as cuBLAS does has it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp4.kernels import fp8_blocks, fp8_ops  # noqa: F401  registers the op
from fp4.runtime import reference
from fp4.runtime.spec import FP8, MXFP8, Quantizer
from tests.runtime.cases import gaussian

KIND = torch.nn.functional.ScalingType
REAL = torch.nn.functional.scaled_mm
ROW, SQUARE = FP8(), FP8(block=(128, 128))
PAIRS = ((ROW, SQUARE), (ROW, ROW), (SQUARE, ROW))
SHAPES = ((256, 384, 256), (150, 48, 200), (1, 1, 1), (7, 130, 640), (12, 16, 1024))  # M, N, K


def values(x: Tensor) -> np.ndarray:
    assert x.dtype == torch.float8_e4m3fn
    return x.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def memory(x: Tensor, size: int) -> np.ndarray:
    """`size` FP32 numbers from the address of `x` on, whatever its shape and strides."""
    assert x.dtype == torch.float32
    assert x.data_ptr() % 16 == 0
    assert x.untyped_storage().nbytes() // 4 - x.storage_offset() >= size
    return x.as_strided((size,), (1,)).numpy().astype(np.float64)


def side(matrix: Tensor, scales: Tensor, kind: Any) -> np.ndarray:
    """An operand (rows, K), decoded. K/128 scales: of every row, rows contiguous; or of 128 rows, K contiguous, padded to 4."""
    x = values(matrix)
    rows, blocks = x.shape[0], x.shape[1] // 128
    r, c = np.arange(rows)[:, None], np.arange(blocks)[None, :]
    if kind is KIND.BlockWise1x128:
        assert tuple(scales.shape) == (rows, blocks)
        at, size = c * rows + r, rows * blocks
    else:
        assert kind is KIND.BlockWise128x128
        wide, tall = -(-blocks // 4) * 4, -(-rows // 128)
        assert tuple(scales.shape) == (wide, tall)
        at, size = r // 128 * wide + c, wide * tall
    return x * np.repeat(memory(scales, size)[at], 128, 1)


def stand_in(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: Any,
    scale_b: Tensor,
    scale_recipe_b: Any,
    output_dtype: torch.dtype,
) -> Tensor:
    given = dict(locals())
    assert mat_a.is_contiguous()
    assert mat_b.t().is_contiguous()
    assert mat_a.shape[0] % 4 == mat_b.shape[1] % 16 == mat_a.shape[1] % 128 == 0
    assert output_dtype in (torch.bfloat16, torch.float32)
    # torch's own checks of the arguments, whose fake tensors, unlike the GPU's, want whole blocks of rows.
    if mat_b.shape[1] % 128 == mat_a.shape[0] % 128 == 0:
        meta: dict[str, Any] = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.items()}
        assert REAL(**meta).shape == (mat_a.shape[0], mat_b.shape[1])
    y = side(mat_a, scale_a, scale_recipe_a) @ side(mat_b.t(), scale_b, scale_recipe_b).T
    return torch.from_numpy(y).to(output_dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op calls the stand-in."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand_in)
    monkeypatch.setattr(fp8_blocks, "multiplies", lambda device: True)


def product(
    a: Tensor, b: Tensor, pair: tuple[Quantizer, Quantizer], bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """The op's product of the quantized matrices, and the operands decoded."""
    codes, decoded = [], []
    for x, q in zip((a, b), pair, strict=True):
        c, s, _ = reference.quantize(x, q)
        codes += [c, s]
        decoded.append(reference.decode(c, s, q, x.shape[1], torch.float32))
    y = torch.ops.fp4.fp8_block_mm(*codes, *map(str, pair), a.shape[1], bias, dtype)
    return y, decoded


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "biased"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)])
@pytest.mark.usefixtures("library")
def test_the_arguments_mean_the_product(
    pair: tuple[Quantizer, Quantizer], shape: tuple[int, int, int], dtype: torch.dtype, biased: bool
) -> None:
    m, n, k = shape
    # Rows, and blocks of K, of different magnitude: no two scales are alike.
    a = gaussian(m, k) * torch.exp2(torch.arange(m) % 5 - 2.0)[:, None] * torch.exp2(torch.arange(k) // 128 % 3 * 1.0)
    b = gaussian(n, k, seed=1) * torch.exp2(torch.arange(n) // 128 * 3.0)[:, None]
    bias = gaussian(n, seed=2).bfloat16() if biased else None
    got, (first, second) = product(a, b, pair, bias, dtype)
    want = first.double() @ second.double().t() + (0 if bias is None else bias.double())
    assert got.dtype == dtype
    assert got.is_contiguous()
    largest = first.double().abs() @ second.double().abs().t() + (0 if bias is None else bias.double().abs())
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    assert ((got.double() - want).abs() <= 1.01 * step * largest).all()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.usefixtures("library")
def test_nan_scales_and_zero_blocks(pair: tuple[Quantizer, Quantizer]) -> None:
    """A block with a NaN or an infinity is NaN, in every row it is of; zero blocks are zero; padding is neither."""
    a, b = gaussian(30, 300), gaussian(140, 300, seed=1)
    a[3, 290], a[4], b[135, 5] = torch.nan, 0.0, torch.inf
    got, (first, second) = product(a, b, pair, None, torch.float32)
    want = reference.mm(first, second, None, None, torch.float32)
    assert torch.equal(got.isnan(), want.isnan())
    assert 0 < want.isnan().sum() < want.numel() or pair[0] == SQUARE
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_layouts() -> None:
    """Shapes and strides of rows and columns that are no multiples."""
    a, a_scales = torch.zeros(150, 640, dtype=torch.uint8), torch.rand(150, 5)
    b, b_scales = torch.zeros(135, 640, dtype=torch.uint8), torch.rand(2, 5)
    given = fp8_blocks.arguments(a, a_scales, b, b_scales, (ROW.block, SQUARE.block))
    assert (given["mat_a"].shape, given["mat_b"].shape, given["mat_b"].stride()) == ((152, 640), (640, 144), (1, 640))
    assert (given["scale_a"].shape, given["scale_a"].stride()) == ((152, 5), (1, 152))
    assert (given["scale_b"].shape, given["scale_b"].stride()) == ((8, 2), (1, 8))
    assert torch.equal(given["scale_a"][:150], a_scales)
    assert torch.equal(given["scale_b"][:5].t(), b_scales)
    assert not given["scale_b"][5:].any()


@pytest.mark.parametrize("shape", [(0, 16, 128), (4, 0, 128), (4, 16, 0)], ids=str)
@pytest.mark.usefixtures("library")
def test_empty_operands(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    bias = gaussian(n).bfloat16()
    got, _ = product(gaussian(m, k), gaussian(n, k), (ROW, SQUARE), bias, torch.bfloat16)
    assert torch.equal(got, bias.expand(m, n))


def test_without_the_library_it_is_the_oracles_product() -> None:
    for pair in PAIRS:
        for dtype in (torch.bfloat16, torch.float32):
            bias = gaussian(40, seed=2)
            got, (first, second) = product(gaussian(33, 200), gaussian(40, 200, seed=1), pair, bias, dtype)
            assert torch.equal(got, reference.mm(first, second, None, bias, dtype))


def test_what_is_not_multiplied_is_named() -> None:
    assert all(fp8_blocks.no_product(*pair) == "" for pair in PAIRS)
    assert "128x128 by 128x128" in fp8_blocks.no_product(SQUARE, SQUARE)
    assert "not quantized" in fp8_blocks.no_product(ROW, None)
    assert "mxfp8" in fp8_blocks.no_product(MXFP8(), ROW)
    assert "blocks of" in fp8_blocks.no_product(FP8(block=(1, 32)), FP8(block=(1, 32)))
    for pair in ((FP8(format="e5m2"), ROW), (ROW, FP8(format="e5m2"))):
        assert "E4M3 by E4M3 only" in fp8_blocks.no_product(*pair)
    codes, scales = torch.zeros(2, 128, dtype=torch.uint8, device="meta"), torch.zeros(2, 1, device="meta")
    with pytest.raises(ValueError, match="fp8_block_mm: .*E4M3 only"):
        torch.ops.fp4.fp8_block_mm(codes, scales, codes, scales, "fp8[format=e5m2]", "fp8", 128, None, torch.float32)
    with pytest.raises(RuntimeError, match="codes .* are not fp8 of 300 columns"):
        torch.ops.fp4.fp8_block_mm(codes, scales, codes, scales, "fp8", "fp8", 300, None, torch.float32)


def test_the_cuda_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, enough in ((None, False), ("12.8", False), ("12.9", True), ("12.10", True), ("13.0", True)):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert fp8_blocks.new_enough() == enough
