"""HF#37905: quantizing a model untied its embedding and head, or lost one of the two gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fp4
from tests.graphs import interpreted, step, unequal
from tests.oracle_recipes import OracleModel

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


class Tied(nn.Module):
    def __init__(self, between: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.between = nn.Linear(64, 64, bias=False) if between else nn.Identity()
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.between(self.embed(tokens)))


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("keep_head", [False, True])
def test_tied_and_summed(keep_head: bool, between: bool) -> None:
    torch.manual_seed(0)
    model = Tied(between)
    plain = copy.deepcopy(model)
    assert plain.head.weight is plain.embed.weight
    tokens = torch.randint(0, 128, (2, 32))
    policy = ALL.with_rules(fp4.keep("head")) if keep_head else ALL
    found = interpreted(model, tokens, policy)
    assert model.head.weight is model.embed.weight
    order = ["between", "head"] if between else ["head"]
    kept = {"head"} if keep_head else set()
    run = OracleModel(plain, order, kept) if kept != set(order) else plain
    expected = step(plain, run, tokens)
    assert unequal(found, {n: v for n, v in expected.items() if n in found}) == []


def test_a_linear_called_three_times_sums_three_gradients() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.f(self.f(self.f(x)))

    torch.manual_seed(0)
    model = Thrice()
    interpreted(model, torch.randn(32, 64), ALL)
    (graph,) = fp4.report(model).graphs
    assert [linear.name for linear in graph.linears] == ["f"] * 3
    assert [g.quantized for linear in graph.linears for g in linear.gemms] == [True] * 9
