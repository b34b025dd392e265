"""Batch sizes that recompiled for each, or computed something else: at most two graphs, each size equal to the oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fp4
from tests.graphs import MLP, Captured, capturing, compiled, step, unequal
from tests.oracle_recipes import OracleModel

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
OPTIONS: dict[str, Any] = {"policy": ALL, "inductor": {"fallback_random": True}}
SIZES = (16, 33, 2, 7, 128, 1)


def check(model: nn.Module, run: Any, order: str, sizes: tuple[int, ...], autocast: bool) -> None:
    plain = copy.deepcopy(model)
    oracle = OracleModel(plain, order, ())
    for size in sizes:
        x = torch.randn(size, 3, 64)
        assert unequal(step(model, run, x, autocast), step(plain, oracle, x, autocast)) == [], size


@pytest.mark.parametrize("autocast", [False, True])
def test_six_batch_sizes(autocast: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    got, model = Captured(), MLP(True)
    with capturing(got):
        check(model, compiled(model, True, **OPTIONS), "abc", SIZES, autocast)
    # One for all sizes, and one for size 1, which Dynamo always specializes.
    assert len(got.joints) <= 2


def test_sizes_found_to_vary() -> None:
    """Static first, dynamic from the second size on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    got, model = Captured(), MLP(True)
    with capturing(got):
        check(model, compiled(model, **OPTIONS), "abc", SIZES[:5], False)
    assert len(got.joints) == 2
    assert [linear.site.m for linear in got.joints[0].context.linears] == [48] * 3
    assert [linear.site.m for linear in got.joints[1].context.linears] == [None] * 3


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU())
    check(model, compiled(model, True, **OPTIONS), "0", (16, 33, 2, 7, 128), False)
