"""ao#4846, Quartet-II K5: a linear with W = 0 and a bias returned 0, the bias dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4
from tests.graphs import interpreted

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
COLUMNS_ONLY = fp4.Policy("dgrad and wgrad", fp4.LinearPrecision(fp4.BF16, ALL.precision.dgrad, ALL.precision.wgrad))


@pytest.mark.parametrize("policy", [ALL, COLUMNS_ONLY], ids=["all", "backward only"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [1.0, -0.1])
def test_the_bias_is_added_and_trained(bias: float, autocast: bool, policy: fp4.Policy) -> None:
    model = nn.Linear(64, 32)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, bias)
    found = interpreted(model, torch.randn(4, 8, 64), policy, autocast)
    dtype = torch.bfloat16 if autocast else torch.float32
    assert torch.equal(found["output"], torch.full((4, 8, 32), bias, dtype=dtype))
    tangent = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(4)).to(dtype)
    # The gradient of the bias is the sum of the unquantized dY.
    assert torch.equal(found["bias"], tangent.reshape(32, 32).sum(0).float())
    assert torch.equal(found["input"], torch.zeros(4, 8, 64))
