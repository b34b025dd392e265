"""Every quantizer against the numpy oracle, by equality, on boundary data as well as on random data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer
from tests.runtime import cases
from tests.runtime import oracle_numpy as oracle


@pytest.mark.parametrize("data", cases.DATA)
@pytest.mark.parametrize("q", cases.QUANTIZERS, ids=str)
def test_equals_oracle(q: Quantizer, data: str) -> None:
    cases.check_against_oracle(cases.DATA[data](), q, seed=12345, site=3)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("q", cases.QUANTIZERS, ids=str)
def test_odd_shapes(q: Quantizer, shape: tuple[int, int]) -> None:
    cases.check_against_oracle(cases.gaussian(*shape, seed=20), q, seed=7, site=1)


@pytest.mark.parametrize("q", [NVFP4(), NVFP4(four_six=True), NVFP4(rounding="ms_eden"), NVFP4(rounding="stochastic")], ids=str)
@pytest.mark.parametrize("amax", [0.0, 1e-3, 1.0, 64.0, cases.FLT_MAX])
def test_given_amax_is_used(q: Quantizer, amax: float) -> None:
    """Above the data's: small scales; below: saturating scales and codes; 0: tensor scale 1."""
    cases.check_against_oracle(cases.gaussian(16, 64, seed=21), q, amax=torch.tensor(amax))


@pytest.mark.parametrize("q", [*cases.NVFP4_CASES, *cases.MX_CASES, *cases.FP8_CASES], ids=str)
def test_any_view_equals_its_contiguous_copy(q: Quantizer) -> None:
    base = cases.gaussian(70, 140, seed=22)
    views = {
        "strided": base[::2, ::2],
        "transposed": base.t(),
        "expanded rows": base[:1].expand(33, 140),
        "expanded columns": base[:, :1].expand(70, 96),
        "offset": base[3:, 5:],
        "reversed order of storage": base.t().contiguous().t(),
    }
    seed = torch.tensor([5])
    for name, view in views.items():
        got = reference.quantize(view, q, None, seed, 2)
        want = reference.quantize(view.clone(memory_format=torch.contiguous_format), q, None, seed, 2)
        for a, b in zip(got, want, strict=True):
            assert cases.same_bits(a, b), name


@pytest.mark.parametrize("q", [q for q in cases.MX_CASES if q.block == (1, 32)], ids=str)
def test_mx_exponent_on_both_sides_of_its_thresholds(q: Quantizer) -> None:
    """Block maxima 1, 1.5, 1.75, 1.8125 times every power of two and their FP32 neighbours, one a block."""
    significands = torch.tensor([1.0, 1.5, 1.75, 1.8125])
    bits = (significands.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])).flatten()
    every = (bits[None, :] + ((torch.arange(-125, 127) << 23)[:, None])).to(torch.int32).view(torch.float32)
    x = torch.zeros(*every.shape, 32)
    x[:, :, 11] = every
    cases.check_against_oracle(x.flatten(1), q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q", [NVFP4(), NVFP4(rounding="ms_eden"), MXFP4(), MXFP8(), FP8()], ids=str)
def test_half_precision_input_is_the_value_given(q: Quantizer, dtype: torch.dtype) -> None:
    x = cases.gaussian(19, 50, seed=23).to(dtype)
    seed = torch.tensor([1])
    for a, b in zip(reference.quantize(x, q, None, seed), reference.quantize(x.float(), q, None, seed), strict=True):
        assert cases.same_bits(a, b)


@pytest.mark.parametrize("q", [*cases.NVFP4_CASES, *cases.SCALE_FORMAT_CASES, *cases.MX_CASES], ids=str)
def test_decoded_operand_is_exact_in_bf16(q: Quantizer) -> None:
    """code * block scale has at most 8 significant bits where the spec says so; E1M6 scales need 9, an outer scale 24."""
    codes, scales, _ = reference.quantize(8 * cases.gaussian(64, 96, seed=24), q, None, torch.tensor([0]))
    in_f32 = reference.decode(codes, scales, q, 96, torch.float32)
    exact = torch.equal(reference.decode(codes, scales, q, 96, torch.bfloat16).float(), in_f32)
    assert q.exact_in_bf16 == (q.scale_format != "e1m6" and not q.has_outer_scale)
    assert exact or not q.exact_in_bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_multiplies_in_f32_and_rounds_once(dtype: torch.dtype) -> None:
    q = NVFP4()
    x = cases.gaussian(9, 40, seed=25)
    codes, scales, tensor_scale = reference.quantize(x, q)
    expected = torch.from_numpy(oracle.quantize(x.numpy(), q).dequantize(40)).to(dtype)
    assert cases.same_bits(reference.dequantize(codes, scales, tensor_scale, q, 40, dtype), expected)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_outer_scales_are_the_tensor_scales_of_the_groups(rounding: str) -> None:
    """Columns 128 to 200 of a row are quantized as they would be alone, up to the draws; so is a group of another size."""
    x = cases.gaussian(5, 200, seed=31) * torch.logspace(-6, 6, 5)[:, None]
    x[2, 130:] *= 1e-9
    x[3, :128] = 0
    q = NVFP4(outer=128, rounding=rounding)
    codes, scales, outer = reference.quantize(x, q, None, torch.tensor([4]), 9)
    assert outer.shape == (5, 2)
    assert outer[3, 0] == 1.0
    for r in range(5):
        for g, part in enumerate((slice(0, 128), slice(128, 200))):
            one = x[r : r + 1, part]
            want_codes, want_scales, want = reference.quantize(one, NVFP4())
            assert torch.equal(outer[r, g], want)
            assert torch.equal(scales[r : r + 1, part.start // 16 : -(-part.stop // 16)], want_scales)
            if rounding == "nearest":
                assert torch.equal(codes[r : r + 1, part.start // 2 : -(-part.stop // 16) * 8], want_codes)


def test_decode_leaves_the_outer_scale_out() -> None:
    q, x = NVFP4(outer=32), cases.gaussian(3, 70, seed=32)
    codes, scales, outer = reference.quantize(x, q)
    decoded = reference.decode(codes, scales, q, 70, torch.float32)
    assert torch.equal(decoded, reference.decode(codes, scales, NVFP4(), 70, torch.float32))
    value = decoded * torch.cat([outer[:, :1].expand(3, 32), outer[:, 1:2].expand(3, 32), outer[:, 2:].expand(3, 6)], 1)
    assert torch.equal(reference.dequantize(codes, scales, outer, q, 70, torch.float32), value)
    for columns in (1, 31, 33, 64):
        assert torch.equal(reference.dequantize(codes, scales, outer, q, columns, torch.float32), value[:, :columns])


def test_decode_keeps_any_number_of_columns() -> None:
    x = cases.gaussian(5, 33, seed=26)
    codes, scales, _ = reference.quantize(x, NVFP4())
    whole = reference.decode(codes, scales, NVFP4(), 48, torch.float32)
    assert whole.shape == (5, 48)
    assert torch.equal(whole[:, 33:], torch.zeros(5, 15))
    for columns in (1, 15, 16, 17, 33):
        assert torch.equal(reference.decode(codes, scales, NVFP4(), columns, torch.float32), whole[:, :columns])


SQUARE = (NVFP4(block=(16, 16)), MXFP4(block=(32, 32)), MXFP8(block=(32, 32)), FP8(block=(128, 128)))


@pytest.mark.parametrize("q", SQUARE, ids=str)
def test_square_blocks_quantize_the_transpose_to_the_transpose(q: Quantizer) -> None:
    assert q.transposable
    x = cases.gaussian(80, 160, seed=27)
    one, other = (reference.quantize(v, q) for v in (x, x.t()))
    value = reference.dequantize(*one, q, 160, torch.float32)
    assert torch.equal(value, reference.dequantize(*other, q, 80, torch.float32).t())
    assert torch.equal(one[1], other[1].t())


class TestAmax:
    @pytest.mark.parametrize("data", cases.DATA)
    def test_equals_oracle(self, data: str) -> None:
        x = cases.DATA[data]()
        got = reference.amax(x)
        assert got.shape == ()
        assert cases.same_bits(got, torch.tensor(oracle.finite_amax(x.float().numpy())))

    @pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0)])
    def test_of_nothing_is_zero(self, shape: tuple[int, int]) -> None:
        assert cases.same_bits(reference.amax(torch.empty(shape)), torch.tensor(0.0))

    def test_ignores_what_is_not_finite(self) -> None:
        x = torch.tensor([[1.0, -7.5, float("nan")], [float("inf"), -float("inf"), 2.0]])
        assert reference.amax(x).item() == 7.5


class TestMatmul:
    """On integers small enough for FP32 the sum is exact, whatever its order."""

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(28)
        return torch.randint(-6, 7, (5, 40), generator=g).float(), torch.randint(-6, 7, (7, 40), generator=g).float()

    @pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
    def test_factor_bias_then_one_rounding(self, operand: torch.dtype, out: torch.dtype) -> None:
        a, b = self._operands()
        alpha, bias = torch.tensor(0.3), torch.linspace(-1, 1, 7)
        exact = (a.double() @ b.double().t()).numpy().astype(np.float32)
        scaled = exact * np.float32(0.3)
        for use_alpha in (True, False):
            for use_bias in (True, False):
                expected = scaled if use_alpha else exact
                expected = expected + bias.numpy() if use_bias else expected
                got = reference.mm(a.to(operand), b.to(operand), alpha if use_alpha else None, bias if use_bias else None, out)
                assert cases.same_bits(got, torch.from_numpy(expected).to(out))

    @pytest.mark.parametrize(("m", "n", "k"), [(0, 7, 40), (5, 0, 40), (5, 7, 0)])
    def test_empty(self, m: int, n: int, k: int) -> None:
        bias = torch.arange(float(n))
        got = reference.mm(torch.ones(m, k), torch.ones(n, k), None, bias, torch.float32)
        assert torch.equal(got, bias.expand(m, n) + float(k))

    def test_strides_do_not_change_the_result(self) -> None:
        a, b = cases.gaussian(33, 64, seed=29), cases.gaussian(17, 64, seed=30)
        want = reference.mm(a, b, None, None, torch.float32)
        assert torch.equal(reference.mm(a.t().contiguous().t(), b.t().contiguous().t(), None, None, torch.float32), want)
