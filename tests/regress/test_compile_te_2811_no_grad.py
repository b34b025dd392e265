"""TE#2811: inference after training gave other outputs, or built a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp4
from tests.graphs import MLP, Captured, capturing, compiled

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_equal_outputs_and_no_backward(without: Any, training: bool, autocast: bool) -> None:
    torch._dynamo.reset()
    got, model, x = Captured(), MLP(True), torch.randn(2, 16, 64)
    with capturing(got), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        run = compiled(model, policy=ALL)
        trained = run(x)
        assert (len(got.forward), len(got.inference)) == (1, 0)
        model.train(training)
        with without():
            inferred = run(x)
    assert torch.equal(trained.detach(), inferred)
    assert (len(got.forward), len(got.inference), len(got.backward)) == (1, 1, 0)
    assert got.joints[1].context.unknown == []
    assert {str(role) for linear in got.joints[1].context.linears for role in linear.gemms} == {"fprop"}
    assert not inferred.requires_grad


def test_training_after_inference() -> None:
    torch._dynamo.reset()
    got, model, x = Captured(), MLP(), torch.randn(32, 64)
    with capturing(got):
        run = compiled(model, policy=ALL)
        with torch.no_grad():
            first = run(x)
        second = run(x)
        second.sum().backward()
    assert torch.equal(first, second.detach())
    assert model.a.weight.grad is not None
    assert [r.kind for r in got.reports] == ["inference", "training"]
