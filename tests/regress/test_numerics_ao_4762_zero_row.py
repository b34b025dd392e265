"""pytorch/ao#4762, #4713: an all-zero row of X made NaN; its output is exactly 0, or the bias, and all else is finite."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime.spec import Quantizer
from tests.runtime import cases


@pytest.mark.parametrize("q", cases.QUANTIZERS, ids=str)
def test_zero_row(q: Quantizer) -> None:
    x, w, bias = cases.gaussian(20, 128, seed=1), cases.gaussian(8, 128, seed=2), cases.gaussian(8, seed=3)
    x[7] = 0
    for b in (None, bias):
        y = cases.quantized_linear(x, w, q, b)
        assert y.isfinite().all()
        assert torch.equal(y[7], torch.zeros(8) if b is None else bias)
