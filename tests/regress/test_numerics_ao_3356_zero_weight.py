"""pytorch/ao#3356: W = 0 (a LoRA B matrix) made the first step NaN; the three GEMMs of the step are finite."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime.spec import Quantizer
from tests.runtime import cases


@pytest.mark.parametrize("q", cases.QUANTIZERS, ids=str)
def test_zero_weight(q: Quantizer) -> None:
    x, w, dy = cases.gaussian(24, 64, seed=1), torch.zeros(8, 64), cases.gaussian(24, 8, seed=2)
    assert torch.equal(cases.quantized_linear(x, w, q), torch.zeros(24, 8))
    assert torch.equal(cases.quantized_linear(dy, w.t(), q), torch.zeros(24, 64))
    dw = cases.quantized_linear(dy.t(), x.t(), q)
    assert dw.isfinite().all()
    assert dw.any()
