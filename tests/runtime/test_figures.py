"""The published and independently recomputed figures: mean squared error on N(0, 1), 2^21 samples, each within 1 %."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation

SEED = torch.tensor([2024])


@pytest.fixture(scope="module")
def samples() -> torch.Tensor:
    return torch.randn(2048, 1024, generator=torch.Generator().manual_seed(100))


def _mse(x: torch.Tensor, q: Quantizer) -> float:
    codes, scales, tensor_scale = reference.quantize(x, q, None, SEED)
    value = reference.dequantize(codes, scales, tensor_scale, q, x.shape[1], torch.float32)
    return ((value - x).double() ** 2).mean().item()


@pytest.mark.parametrize(
    ("q", "figure"),
    [
        (NVFP4(), 9.03e-3),
        (NVFP4(four_six=True), 7.55e-3),
        (NVFP4(block=(16, 16)), 12.39e-3),
        (NVFP4(rounding="stochastic"), 18.9e-3),
        (NVFP4(rounding="stochastic", range_guard=True), 23.5e-3),
        (MXFP4(), 13.22e-3),
        (MXFP4(scale_rule="even"), 12.51e-3),
        (MXFP4(scale_rule="ceil"), 13.31e-3),
    ],
    ids=str,
)
def test_mean_squared_error(samples: torch.Tensor, q: Quantizer, figure: float) -> None:
    assert _mse(samples, q) == pytest.approx(figure, rel=0.01)


def test_ms_eden_and_its_correction(samples: torch.Tensor) -> None:
    """Error in the rotated space (the rotation keeps it), and the distribution of the correction S = <y,y>/<y,yhat>."""
    rotation = Rotation(size=128, signs="fresh", bf16=False)
    y = reference.rotate(samples, rotation, SEED, 0)
    q = NVFP4(rounding="ms_eden")
    assert _mse(y, q) == pytest.approx(9.31e-3, rel=0.01)

    codes, scales, tensor_scale = reference.quantize(y, q, None, SEED)
    # S from what is stored: the codes' own least-squares scale over the scale they were rounded with, an E4M3 number.
    factor = 6 * (16 / 17) / 0.93
    blocks = y.reshape(2048, 64, 16)
    rounded = (blocks.abs().amax(-1) / (factor * tensor_scale)).to(torch.float8_e4m3fn).float()
    unit = reference.decode(codes, torch.full_like(scales, 0x38), q, 1024, torch.float32).reshape(2048, 64, 16)
    estimate = unit * rounded[..., None] * tensor_scale
    correction = (blocks * blocks).sum(-1) / (blocks * estimate).sum(-1)
    # 1 % lie below and 1 % above.
    low, high = torch.quantile(correction.flatten()[::4], torch.tensor([0.01, 0.99])).tolist()
    assert low == pytest.approx(0.940, abs=2e-3)
    assert high == pytest.approx(1.086, abs=2e-3)


def test_posthoc_range_alignment_costs_nothing(samples: torch.Tensor) -> None:
    """The error beside ms_eden's 9.31e-3, and the range: the largest block scale decodes to 256 before its rounding."""
    y = reference.rotate(samples, Rotation(size=128, signs="fresh", bf16=False), SEED, 0)
    q = NVFP4(rounding="ms_eden", posthoc=True)
    assert _mse(y, q) == pytest.approx(9.33e-3, rel=0.01)
    _, scales, _ = reference.quantize(y, q, None, SEED)
    assert int(scales.max()) == 0x78  # 256, which needs no rounding


def test_four_six_chooses_four(samples: torch.Tensor) -> None:
    """A block maximum that is mapped to 4 has the largest code 6 (the value 4), or a scale below which 6 is out of reach."""
    codes, _, _ = reference.quantize(samples, NVFP4(four_six=True))
    magnitude = torch.stack([codes & 7, (codes >> 4) & 7], -1).reshape(2048, 64, 16)
    share = (magnitude.amax(-1) < 7).double().mean().item()
    assert share == pytest.approx(0.452, rel=0.01)
