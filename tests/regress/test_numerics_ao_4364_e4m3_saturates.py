"""pytorch/ao#4364: 1e4 cast to E4M3 became NaN; it is 448, as an element and as a block scale."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP8, NVFP4


@pytest.mark.parametrize("value", [449.0, 464.0, 480.0, 1e4, 1e30])
def test_block_scale(value: float) -> None:
    x = torch.full((1, 16), value * 6)
    q = NVFP4(tensor_scale=False)
    codes, scales, _ = reference.quantize(x, q)
    assert scales.tolist() == [[0x7E]]
    assert torch.equal(reference.decode(codes, scales, q, 16, torch.float32), torch.full((1, 16), 6 * 448.0))


@pytest.mark.parametrize("value", [465.0, 480.0, 500.0, 511.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_element(value: float, sign: int) -> None:
    """OCP's floor rule takes scale 1 for a maximum in [256, 512), so what lies over 448 saturates."""
    q = MXFP8(scale_rule="floor")
    x = torch.full((1, 32), sign * value)
    codes, scales, _ = reference.quantize(x, q)
    assert scales.tolist() == [[127]]
    assert torch.equal(reference.decode(codes, scales, q, 32, torch.float32), torch.full((1, 32), sign * 448.0))
