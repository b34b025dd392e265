"""pytorch#168373: a backend built anew for each call recompiled every time; equal policies must be one backend call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp4
from tests.graphs import MLP, Captured, capturing, compiled


def mine(site: fp4.LinearSite) -> fp4.LinearPrecision:
    return fp4.recipe("nvfp4").precision


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "recipe by name": lambda: {"recipe": "nvfp4"},
    "equal policies": lambda: {"policy": fp4.recipe("nvfp4").with_rules(fp4.keep("c"))},
    "pickled": lambda: {"policy": pickle.loads(pickle.dumps(fp4.recipe("nvfp4")))},
    "one function": lambda: {"policy": fp4.policy(mine)},
    "defaults": dict,
    "Inductor's": lambda: {"inductor": {"fallback_random": True}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_backend_call(name: str) -> None:
    torch._dynamo.reset()
    got, model, x = Captured(), MLP(), torch.randn(32, 64)
    with capturing(got):
        outputs = [compiled(model, **OPTIONS[name]())(x) for _ in range(3)]
    assert len(got.joints) == 1
    assert all(torch.equal(outputs[0], y) for y in outputs)


def test_equal_blocks_compiled_one_by_one_share_a_graph() -> None:
    torch._dynamo.reset()
    got, x = Captured(), torch.randn(32, 64)
    blocks = nn.ModuleList(MLP() for _ in range(4))
    with capturing(got):
        for block in blocks:
            block.compile(backend="fp4", options={"recipe": "nvfp4"})
            x = block(x).detach()  # an input that asks for a gradient is another graph
    assert len(got.joints) == 1


def test_another_policy_is_another_graph() -> None:
    """The tests above can fail."""
    torch._dynamo.reset()
    got, model, x = Captured(), MLP(), torch.randn(32, 64)
    with capturing(got):
        found = [compiled(model, recipe=recipe)(x) for recipe in ("nvfp4", "bf16")]
    assert len(got.joints) == 2
    assert not torch.equal(*found)
