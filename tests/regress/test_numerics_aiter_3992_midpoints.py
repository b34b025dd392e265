"""ROCm/aiter#3992, tenstorrent/tt-metal#51975: the midpoints of E2M1 and their FP32 neighbours, both signs, any scale."""

from __future__ import annotations

import math

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer

# midpoint, value below, value of the tie, value above
TIES = (
    (0.25, 0.0, 0.0, 0.5),
    (0.75, 0.5, 1.0, 1.0),
    (1.25, 1.0, 1.0, 1.5),
    (1.75, 1.5, 2.0, 2.0),
    (2.5, 2.0, 2.0, 3.0),
    (3.5, 3.0, 4.0, 4.0),
    (5.0, 4.0, 4.0, 6.0),
)


@pytest.mark.parametrize("power", [-6, -1, 0, 3, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("q", [NVFP4(tensor_scale=False), MXFP4(), MXFP4(scale_rule="ceil")], ids=str)
def test_ties(q: Quantizer, sign: float, power: int) -> None:
    rows, expected = [], []
    for middle, below, tie, above in TIES:
        m = torch.tensor(middle)
        near = [torch.nextafter(m, torch.tensor(0.0)).item(), middle, torch.nextafter(m, torch.tensor(math.inf)).item()]
        rows.append([6.0, *near] * 8)
        expected.append([6.0, below, tie, above] * 8)
    scale = sign * 2.0**power
    x, want = torch.tensor(rows) * scale, torch.tensor(expected) * scale
    assert torch.equal(reference.dequantize(*reference.quantize(x, q), q, 32, torch.float32), want)
