"""torchao: a frozen weight still had its wgrad computed, or got a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4
from tests.graphs import MLP, ops, quantizers, rewritten, trios

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
FULL = ("fprop", "dgrad", "wgrad")


@pytest.mark.parametrize("frozen", ["a", "b", "c", "ab", "abc"])
def test_no_wgrad_in_the_graph(frozen: str) -> None:
    model = MLP(True)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    got = rewritten(model, torch.randn(32, 64, requires_grad=True), policy=ALL)
    assert trios(got) == [(name, FULL[:2] if name in frozen else FULL) for name in "abc"]
    assert ops(got.joint.final)["fp4::mm"] == 9 - len(frozen)
    # No column-wise copy of X and dY either: it is wgrad that rotates.
    assert ops(got.joint.final)["fp4::rotate"] == 2 * (3 - len(frozen))
    assert [name for name, p in model.named_parameters() if p.grad is None] == [
        f"{n}.{k}" for n in frozen for k in ("weight", "bias")
    ]


def test_frozen_weight_with_a_trained_bias() -> None:
    model = MLP(True)
    model.b.weight.requires_grad_(False)
    got = rewritten(model, torch.randn(32, 64, requires_grad=True), policy=ALL)
    assert dict(trios(got))["b"] == FULL[:2]
    assert model.b.weight.grad is None
    assert model.b.bias.grad is not None


def test_lora_on_a_frozen_base() -> None:
    """The base has fprop and dgrad, the adapters all three."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    got = rewritten(Lora(), torch.randn(32, 64, requires_grad=True), policy=ALL)
    assert dict(trios(got)) == {"base": FULL[:2], "down": FULL, "up": FULL}
    assert quantizers(got.joint.final)["nvfp4[rounding=stochastic]"] == 5


def test_unfreezing_compiles_anew() -> None:
    model = MLP()
    model.a.requires_grad_(False)
    rewritten(model, torch.randn(32, 64), policy=ALL)
    assert model.a.weight.grad is None
    model.a.requires_grad_(True)
    rewritten(model, torch.randn(32, 64), policy=ALL)
    assert model.a.weight.grad is not None
