"""axolotl#3767: stochastic rounding left the two neighbours of a value; 1e5 copies in each interval, mean within 4 sigma."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
COPIES = 100_800  # rows of 30 beside the two that hold the scale


@pytest.mark.parametrize(
    "q",
    [
        NVFP4(rounding="stochastic", tensor_scale=False),
        MXFP4(rounding="stochastic", scale_rule="ceil"),
    ],
    ids=str,
)
@pytest.mark.parametrize("interval", range(7))
def test_support_and_mean(q: Quantizer, interval: int) -> None:
    low, high = GRID[interval], GRID[interval + 1]
    p = 0.3
    x = torch.full((COPIES // 30, 32), low + p * (high - low))
    x[:, ::16] = 6.0
    parts = reference.quantize(x, q, None, torch.tensor([0]), interval)
    value = reference.dequantize(*parts, q, 32, torch.float32)
    assert torch.equal(value[:, ::16], x[:, ::16])
    drawn = value.reshape(-1, 16)[:, 1:]
    assert drawn.numel() == COPIES
    up = drawn == high
    assert (up | (drawn == low)).all()
    assert abs(up.double().mean().item() - p) < 4 * (p * (1 - p) / COPIES) ** 0.5
