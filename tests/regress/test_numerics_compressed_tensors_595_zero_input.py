"""vllm-project/compressed-tensors#595: X = 0 gave scales that were not finite; here they are, and the output is 0."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import Quantizer
from tests.runtime import cases


@pytest.mark.parametrize("q", cases.QUANTIZERS, ids=str)
def test_zero_input(q: Quantizer) -> None:
    x = torch.zeros(17, 96)
    _, scales, _, _, tensor_scale = reference.quantize_values(x, q, None, torch.tensor([0]))
    assert scales.isfinite().all()
    assert tensor_scale.isfinite().all()
    assert torch.equal(cases.quantized_linear(x, cases.gaussian(8, 96), q), torch.zeros(17, 8))
