"""Matmul kernels under the interpreter equal the oracle's GEMM: exactly where FP32 sums are exact, elsewhere within a bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fp4.kernels.matmul import _Run, scaled_mm, usual
from fp4.kernels.matmul_spec import FORMATS, MatmulSpec, MatmulTile, format_of
from fp4.kernels.target import INTERPRETER, Target
from fp4.runtime import reference
from fp4.runtime.layout import row_scales, swizzle
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4, Quantizer
from tests.kernels.interpreted.dot_scaled import dot_scaled
from tests.runtime.cases import gaussian, same_bits

PAIRS: list[tuple[Quantizer, Quantizer]] = [
    (NVFP4(), NVFP4()),
    (MXFP4(), MXFP4()),
    (MXFP8(), MXFP8(format="e5m2")),
    (MXFP8(), MXFP4()),
]
SHAPES = [(1, 1, 32), (130, 140, 200), (130, 3, 48), (5, 300, 16), (128, 128, 256), (33, 129, 1000)]
TILES = [None, MatmulTile(k=128, stages=1), MatmulTile(k=256, stages=1, persistent=True), MatmulTile(k=128, stages=1, split=3)]
# Bytes whose values are few binades wide, so that sums of a thousand products of random signs need less than 24 bits.
NARROW = {"e2m1": (0, 256), "e4m3": (0x30, 0x40), "e5m2": (0x38, 0x40)}
NARROW_SCALES = {"e4m3": (0x38, 0x40), "e8m0": (126, 128)}


def bytes_of(rows: int, columns: int, span: tuple[int, int], seed: int) -> Tensor:
    return torch.randint(*span, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def operand(rows: int, k: int, q: Quantizer, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and one scale a row and block, every one drawn on its own."""
    form = FORMATS[str(format_of(q))]
    blocks = -(-k // form.block)
    codes = bytes_of(rows, blocks * form.block // form.per_byte, NARROW[form.element], seed)
    return codes, bytes_of(rows, blocks, NARROW_SCALES[form.scale], seed + 1)


def product(a: Any, b: Any, qa: Quantizer, qb: Quantizer, **given: Any) -> Tensor:
    """The kernel on (codes, plain scales) pairs."""
    with dot_scaled():
        return scaled_mm(a[0], swizzle(a[1]), b[0], swizzle(b[1]), str(format_of(qa)), str(format_of(qb)), **given)


def decoded(x: Any, q: Quantizer) -> Tensor:
    return reference.decode(x[0], x[1], q, x[0].shape[1] * FORMATS[str(format_of(q))].per_byte, torch.float32)


def oracle(a: Any, b: Any, qa: Quantizer, qb: Quantizer, alpha: Any, bias: Any, dtype: torch.dtype) -> Tensor:
    return reference.mm(decoded(a, qa), decoded(b, qb), alpha, bias, dtype)


@pytest.mark.parametrize(("qa", "qb"), PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_sums_are_the_oracles(qa: Quantizer, qb: Quantizer, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = operand(m, k, qa, 1), operand(n, k, qb, 3)
    alphas, bias = [torch.tensor(0.37), torch.tensor(3.1)], torch.randn(n, generator=torch.Generator().manual_seed(5))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        got = product(a, b, qa, qb, alphas=alphas, bias=bias, dtype=dtype)
        assert same_bits(got, oracle(a, b, qa, qb, alphas[0] * alphas[1], bias, dtype))
    for tile in TILES:
        got = product(a, b, qa, qb, tile=tile, bias=bias.bfloat16())
        assert same_bits(got, oracle(a, b, qa, qb, None, bias.bfloat16(), torch.bfloat16))
    y = torch.arange(m * n, dtype=torch.float32).reshape(m, n)
    for tile in TILES[1::2]:
        got = product(a, b, qa, qb, alphas=alphas[:1], accumulate=y.clone(), tile=tile)
        assert same_bits(got, y + oracle(a, b, qa, qb, alphas[0], None, torch.float32))


@pytest.mark.parametrize(
    ("qa", "qb"), [*PAIRS, (NVFP4(block=(16, 16)), NVFP4(four_six=True)), (MXFP4(block=(32, 32)), MXFP8())], ids=str
)
@pytest.mark.parametrize("shape", [(70, 150, 300), (17, 5, 96)], ids=str)
def test_quantized_data_within_the_bound_of_fp32_sums(qa: Quantizer, qb: Quantizer, shape: tuple[int, int, int]) -> None:
    """Products of decoded elements are exact in FP32 (12 significant bits at most). A sum of K of them in any order is within
    (K-1) u / (1 - (K-1) u) of the sum of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section
    4.2); alpha is rounded once, and its product with the sum once. u = 2^-24, doubled, since tensor cores may truncate."""
    m, n, k = shape
    parts = []
    for rows, q, seed in ((m, qa, 7), (n, qb, 8)):
        x = gaussian(rows, k, seed=seed) * torch.exp2(torch.arange(rows) % 7 - 3.0)[:, None]
        codes, scales, tensor_scale = reference.quantize(x, q)
        decoded = reference.decode(codes, scales, q, k, torch.float64)
        parts.append(((codes, row_scales(scales, rows, q.block[0])), tensor_scale, decoded))
    (a, ta, da), (b, tb, db) = parts
    got = product(a, b, qa, qb, alphas=[ta, tb], dtype=torch.float32).double()
    alpha = ta.double() * tb.double()
    u = 2.0**-23
    bound = (k * u / (1 - k * u) + 2 * u) * (da.abs() @ db.abs().t()) * alpha
    assert ((got - da @ db.t() * alpha).abs() <= bound).all()
    assert got.abs().max() > 0


def test_nan_scales_reach_their_row_alone() -> None:
    q = NVFP4()
    a, b = operand(40, 64, q, 1), operand(20, 64, q, 3)
    a[1][7, 2] = 0x7F
    got = product(a, b, q, q)
    assert got[7].isnan().all()
    assert got.isnan().sum() == 20


def test_no_rows_no_columns() -> None:
    q, bias = MXFP4(), torch.randn(20)
    a, b = operand(40, 64, q, 1), operand(20, 64, q, 3)
    none = operand(0, 64, q, 1)
    assert product(none, b, q, q).shape == (0, 20)
    assert product(a, none, q, q).shape == (40, 0)
    a, b = ((x[0][:, :0].contiguous(), x[1][:, :0]) for x in (a, b))
    assert torch.equal(product(a, b, q, q, bias=bias, dtype=torch.float32), bias.expand(40, 20))
    assert torch.equal(product(a, b, q, q), torch.zeros(40, 20, dtype=torch.bfloat16))


def test_wrong_sizes_are_named() -> None:
    q = NVFP4()
    a, b = operand(40, 64, q, 1), operand(20, 64, q, 3)
    with pytest.raises(ValueError, match="a's scales are 512"):
        product((operand(200, 64, q, 1)[0], a[1]), b, q, q)
    with pytest.raises(ValueError, match="b has 32 contracted"):
        product(a, (b[0][:, :16].contiguous(), b[1]), q, q)
    with pytest.raises(ValueError, match="accumulate is"):
        product(a, b, q, q, accumulate=torch.zeros(20, 40))


def test_the_fastest_tile_is_the_one_measured() -> None:
    q = NVFP4()
    a, b = operand(300, 64, q, 1), operand(20, 64, q, 3)
    spec = MatmulSpec("nvfp4", "nvfp4", alphas=0)
    y = torch.empty(300, 20, dtype=torch.bfloat16)
    run = _Run(spec, Target(INTERPRETER), (a[0], b[0]), (swizzle(a[1]), swizzle(b[1])), [], None, y, 64)
    seen: list[float] = []

    def seconds(launch: Any) -> float:
        launch()
        seen.append(3.0 - len(seen))
        return seen[-1]

    with dot_scaled():
        assert run.fastest(seconds) == [*run.tiles, usual(spec, run.target, 300, 20, 64, 3)][len(seen) - 1]
    assert same_bits(y, oracle(a, b, q, q, None, None, torch.bfloat16))


def test_the_interpreters_own_dot_scaled_is_wrong() -> None:
    """What the shim is for. When this fails, Triton's own is right and the shim can go."""

    @triton.jit
    def kernel(a, sa, b, sb, y):  # type: ignore[no-untyped-def]
        i, k, s = tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, 2)
        x = tl.load(a + i[:, None] * 16 + k[None, :])
        w = tl.load(b + i[:, None] * 16 + k[None, :])
        xs = tl.load(sa + i[:, None] * 2 + s[None, :])
        ws = tl.load(sb + i[:, None] * 2 + s[None, :])
        out = tl.dot_scaled(x, xs, "e2m1", w.T, ws, "e2m1", tl.zeros((16, 16), tl.float32))
        tl.store(y + i[:, None] * 16 + i[None, :], out)

    q = NVFP4()
    (a, sa), (b, sb) = operand(16, 32, q, 1), operand(16, 32, q, 3)

    def run() -> Tensor:
        y = torch.empty(16, 16)
        kernel[(1,)](a, sa.view(torch.float8_e4m3fn), b, sb.view(torch.float8_e4m3fn), y)
        return y

    want = oracle((a, sa), (b, sb), q, q, None, None, torch.float32)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        with pytest.raises(InterpreterError, match="has no attribute"):
            run()
    else:
        assert not torch.equal(run(), want)
    with dot_scaled():
        assert torch.equal(run(), want)
