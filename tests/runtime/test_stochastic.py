"""Stochastic rounding: support, mean, independence; MS-EDEN's unbiasedness and what it needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation
from tests.runtime import cases
from tests.runtime import oracle_numpy as oracle

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SR = NVFP4(rounding="stochastic")
UNSCALED_SR = NVFP4(rounding="stochastic", tensor_scale=False)


def _seed(value: int) -> torch.Tensor:
    return torch.tensor([value])


def _value(x: torch.Tensor, q: Quantizer, seed: int, site: int = 0) -> torch.Tensor:
    codes, scales, tensor_scale = reference.quantize(x, q, None, _seed(seed), site)
    return reference.dequantize(codes, scales, tensor_scale, q, x.shape[1], torch.float32)


@pytest.mark.parametrize(("seed", "share"), [(0, 0.1), (0, 0.5), (0, 0.83), (2**40, 0.1)])
def test_only_the_two_neighbours_with_the_right_mean(seed: int, share: float) -> None:
    """1e5 copies of one value in each interval, both signs, seed 0 included; the scale is 1 as every block holds a 6."""
    low, high = torch.cat([GRID[:-1], -GRID[:-1]]), torch.cat([GRID[1:], -GRID[1:]])
    v = low + share * (high - low)
    x = v[:, None, None].repeat(1, 6700, 16)
    x[:, :, 15] = 6.0
    rounded = _value(x.reshape(-1, 16), UNSCALED_SR, seed).reshape(x.shape)[:, :, :15]
    up = rounded == high[:, None, None]
    assert (up | (rounded == low[:, None, None])).all()
    p = ((v - low) / (high - low)).double()
    mean = up.double().mean((1, 2))
    assert ((mean - p).abs() < 4 * (p * (1 - p) / (6700 * 15)).sqrt()).all()


@pytest.mark.parametrize("q", [UNSCALED_SR, MXFP4(scale_rule="ceil", rounding="stochastic")], ids=str)
def test_values_on_the_grid_stay(q: Quantizer) -> None:
    x = torch.cat([GRID, -GRID]).repeat(200, 2)
    assert torch.equal(_value(x, q, 3), x)


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


@pytest.mark.parametrize("other", [{"site": 1}, {"seed": 1}, {"seed": 2**31}, {"seed": 1, "site": -1}])
def test_sites_and_steps_are_uncorrelated(other: dict[str, int]) -> None:
    """The same input twice; the rounding errors of two draws have no more correlation than chance (4.5 sigma)."""
    x = cases.gaussian(256, 512, seed=60)
    a = _value(x, SR, 0, 0) - x
    b = _value(x, SR, other.get("seed", 0), other.get("site", 0)) - x
    assert abs(_correlation(a, b)) < 4.5 / x.numel() ** 0.5


@pytest.mark.parametrize("shape", [(256, 512), (128, 1024), (48, 2048)])
def test_rows_and_tiles_are_uncorrelated(shape: tuple[int, int]) -> None:
    """A constant operand: rows, columns, 16x16 tiles and the four words of one counter against their neighbours."""
    x = torch.full(shape, 0.4)
    x[:, ::16] = 6.0
    up = (_value(x, UNSCALED_SR, 0) > 0).float()
    keep = torch.ones(shape[1], dtype=torch.bool)
    keep[::16] = False
    for distance in (1, 2, 4, 16, 32):
        below = up[distance:, keep]
        assert abs(_correlation(below, up[:-distance, keep])) < 4.5 / below.numel() ** 0.5
        both = keep[distance:] & keep[:-distance]
        beside = up[:, distance:][:, both]
        assert abs(_correlation(beside, up[:, :-distance][:, both])) < 4.5 / beside.numel() ** 0.5


def _mean_error(x: torch.Tensor, q: Quantizer, draws: int) -> torch.Tensor:
    """Error of the mean of `draws` roundings of `x`: copies below each other, since every row has its own draws."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for seed in range(-(-draws // 64)):
        copies = min(draws, 64)
        total += _value(x.repeat(copies, 1), q, seed).double().reshape(copies, *x.shape).sum(0)
    return total / draws - x


@pytest.mark.parametrize(
    "q",
    [
        NVFP4(rounding="stochastic", range_guard=True),
        NVFP4(rounding="stochastic", range_guard=True, block=(16, 16)),
        MXFP4(rounding="stochastic", scale_rule="ceil"),
        MXFP4(rounding="stochastic", scale_rule="range_fit"),
        MXFP4(rounding="stochastic", prescale=0.75),
    ],
    ids=str,
)
def test_unbiased_where_nothing_clips(q: Quantizer) -> None:
    """The squared error of the mean of B draws falls as 1/B, and every element's mean is within 6 sigma."""
    x = cases.gaussian(32, 160, seed=61)
    errors = {draws: _mean_error(x, q, draws) for draws in (16, 256)}
    single = _mean_error(x.repeat(8, 1), q, 1).pow(2).mean().item()
    for draws in (16, 256):
        assert errors[draws].pow(2).mean().item() == pytest.approx(single / draws, rel=0.1)
    codes, scales, tensor_scale = reference.quantize(x, q, None, _seed(0))
    widest = 2 * _block_scales(codes, scales, q) * tensor_scale.double()
    assert (errors[256].abs() <= 6 * 0.5 * widest / 256**0.5).all()


def _block_scales(codes: torch.Tensor, scales: torch.Tensor, q: Quantizer) -> torch.Tensor:
    """Block scale of every element (R, C), half of the widest grid interval."""
    ones = torch.full_like(codes, 0x22)
    return reference.decode(ones, scales, q, codes.shape[1] * 2, torch.float32).double()


@pytest.mark.parametrize("q", [SR, MXFP4(rounding="stochastic", allow_clipping=True)], ids=str)
def test_clipping_is_biased(q: Quantizer) -> None:
    """What allow_clipping and the plain factor 6 cost: the error of the mean stalls far above 1/B."""
    x = cases.gaussian(32, 160, seed=62)
    single = (_value(x, q, 999) - x).double().pow(2).mean().item()
    assert _mean_error(x, q, 256).pow(2).mean().item() > 2 * single / 256


def test_range_guard_never_clips_where_the_plain_factor_does() -> None:
    """|x| <= 6 s T for every block, over all positions of the block maximum between two E4M3 numbers."""
    x = torch.zeros(4096, 16)
    x[:, 0] = torch.linspace(2.0**-6, 448.0, 4096) * 6
    clipped = {}
    for guard in (False, True):
        q = NVFP4(rounding="stochastic", range_guard=guard)
        codes, scales, tensor_scale = reference.quantize(x, q, None, _seed(0))
        limit = 6 * reference.decode(torch.full_like(codes, 0x22), scales, q, 16, torch.float32) * tensor_scale
        clipped[guard] = (x > limit * (1 + 1e-6)).any().item()
    assert clipped == {False: True, True: False}


def test_four_six_with_stochastic_rounding_would_be_biased() -> None:
    """The reason for the refusal, measured: choosing between two scales by the drawn error enlarges the estimate."""
    x = cases.gaussian(4096, 16 * 16, seed=63)
    tensor_scale = x.abs().max() / (6 * 256)
    peak = x.reshape(-1, 16).abs().amax(-1, keepdim=True)
    candidates = []
    for c in (6.0, 4.0):
        # A guarded scale for 6, so that neither candidate clips and each alone is unbiased.
        scale = (peak / (c * 16 / 17 * tensor_scale)).to(torch.float8_e4m3fn).float() * tensor_scale
        ratio = (x.reshape(-1, 16) / scale).numpy()
        draw = torch.randint(1 << 16, ratio.shape, generator=torch.Generator().manual_seed(int(c))).numpy()
        code = oracle.element_code(ratio, "e2m1", draw)
        value = torch.from_numpy(oracle.table("e2m1")[code & 7].astype(np.float32)) * scale
        value = torch.where(torch.from_numpy(code >= 8), -value, value)
        candidates.append((value, (value - x.reshape(-1, 16)).pow(2).sum(-1, keepdim=True)))
    (six, six_error), (four, four_error) = candidates
    chosen = torch.where(four_error < six_error, four, six)
    flat, n = x.reshape(-1, 16), x.numel()

    def gain(v: torch.Tensor) -> float:
        return ((v * flat).sum() / (flat * flat).sum()).item() - 1

    noise = 5 * ((six - flat).pow(2).mean().item() / n) ** 0.5
    assert abs(gain(six)) < noise
    assert abs(gain(four)) < noise
    assert abs(gain(chosen)) > 2 * noise


def _eden_mean_error(signs: str, draws: tuple[int, ...], posthoc: bool = False) -> list[float]:
    """Relative squared error of the mean of the first `draws` estimates, in the original space."""
    x = cases.gaussian(16, 1024, seed=64)
    n = 128
    h = torch.from_numpy(oracle.hadamard(n)).float() / n**0.5
    q, rotation = NVFP4(rounding="ms_eden", posthoc=posthoc), Rotation(size=n, signs=signs, bf16=False)
    total = torch.zeros(x.shape, dtype=torch.float64)
    errors = []
    for step in range(max(draws)):
        y = reference.rotate(x, rotation, _seed(step), 0)
        codes, scales, tensor_scale = reference.quantize(y, q, None, _seed(step), 0)
        value = reference.dequantize(codes, scales, tensor_scale, q, y.shape[1], torch.float32)
        back = (value.reshape(-1, n) @ h) * reference.signs(rotation, _seed(step), 0, x.device)
        total += back.reshape(x.shape)
        if step + 1 in draws:
            errors.append(((total / (step + 1) - x) ** 2).sum().item() / x.pow(2).sum().item())
    return errors


@pytest.mark.parametrize("posthoc", [False, True])
def test_ms_eden_is_unbiased_with_fresh_signs(posthoc: bool) -> None:
    """1/B down to 5e-5 at B = 256."""
    one, sixteen, many = _eden_mean_error("fresh", (1, 16, 256), posthoc)
    assert sixteen == pytest.approx(one / 16, rel=0.15)
    assert many == pytest.approx(one / 256, rel=0.5)
    assert many < 5e-5


def test_ms_eden_stalls_with_fixed_signs() -> None:
    """The specification refuses this; the pieces are put together here to show why."""
    assert _eden_mean_error("fixed", (64,))[0] == pytest.approx(8e-3, rel=0.1)


def test_ms_eden_of_a_sparse_vector_is_the_documented_exception() -> None:
    """e_0 + 0.1 e_1: the guarantee is asymptotic in the number of nonzero entries."""
    n = 128
    x = torch.zeros(1, n)
    x[0, 0], x[0, 1] = 1.0, 0.1
    h = torch.from_numpy(oracle.hadamard(n)).float() / n**0.5
    rotation, q = Rotation(size=n, signs="fresh", bf16=False), NVFP4(rounding="ms_eden")
    total = torch.zeros(1, n, dtype=torch.float64)
    for step in range(256):
        y = reference.rotate(x, rotation, _seed(step), 0)
        value = reference.dequantize(*reference.quantize(y, q, None, _seed(step), 0), q, n, torch.float32)
        total += (value @ h) * reference.signs(rotation, _seed(step), 0, x.device)
    error = ((total / 256 - x) ** 2).sum().item() / x.pow(2).sum().item()
    assert error > 1e-4
