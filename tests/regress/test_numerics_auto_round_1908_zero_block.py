"""intel/auto-round#1908: a zero block inside a random tensor did not come back as zeros."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import Quantizer
from tests.runtime import cases


@pytest.mark.parametrize("q", cases.QUANTIZERS, ids=str)
def test_zero_block(q: Quantizer) -> None:
    x = cases.gaussian(256, 384, seed=1)
    x[128:, 128:256] = 0
    parts = reference.quantize(x, q, None, torch.tensor([0]))
    value = reference.dequantize(*parts, q, 384, torch.float32)
    assert not value[128:, 128:256].any()
    assert value[:128].any(1).all()
