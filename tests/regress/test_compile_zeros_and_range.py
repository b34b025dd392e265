"""ao#4762, #4713, #3356, compressed-tensors#595, auto-round#1908, as whole training steps: zeros and extremes anywhere.

The quantizers themselves are tested in the files of those names. Here every recipe trains a step through the backend; what is
finite stays finite, what is zero is exactly zero or the bias, and all of it equals the eager oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp4
from tests.graphs import interpreted, step, unequal
from tests.oracle_recipes import OracleModel

RECIPES = [name for name in fp4.recipes() if name != "bf16"]
X = Callable[[Tensor], Tensor]


class One(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f = nn.Linear(64, 48, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def trained(model: nn.Module, x: Tensor, recipe: str) -> dict[str, Tensor]:
    policy = fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)
    found = interpreted(model, x, policy)
    oracle = OracleModel(copy.deepcopy(model), ["f"], (), recipe)
    theirs = step(oracle.model, oracle, x)
    different = [n for n in found if not torch.equal(found[n].nan_to_num(7.0), theirs[n].nan_to_num(7.0))]
    assert different == []
    return found


def rows(*which: int) -> X:
    def zero(x: Tensor) -> Tensor:
        x = x.clone()
        x[list(which)] = 0
        return x

    return zero


def columns(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 16:48] = 0
    return x


INPUTS: dict[str, X] = {
    "a zero row": rows(7),
    "three zero rows": rows(0, 16, 32),
    "all rows but one": rows(*range(1, 33)),
    "all zero": torch.zeros_like,
    "negative zero": lambda x: -torch.zeros_like(x),
    "zero blocks": columns,
    "one element": lambda x: torch.zeros_like(x).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1.0)),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("recipe", ["nvfp4", "quartet"])
def test_zero_activations(recipe: str, name: str) -> None:
    model, x = One(), INPUTS[name](torch.randn(33, 64, generator=torch.Generator().manual_seed(1)))
    found = trained(model, x, recipe)
    assert all(v.isfinite().all() for v in found.values())
    zero = x.abs().sum(1) == 0
    assert torch.equal(found["output"][zero], model.f.bias.detach().expand(int(zero.sum()), -1))


@pytest.mark.parametrize(("recipe", "bias"), [*((name, True) for name in RECIPES), ("nvfp4", False), ("quartet2", False)])
def test_zero_weight(recipe: str, bias: bool) -> None:
    model = One(bias)
    nn.init.zeros_(model.f.weight)
    found = trained(model, torch.randn(33, 64, generator=torch.Generator().manual_seed(1)), recipe)
    assert all(v.isfinite().all() for v in found.values())
    expected = model.f.bias.detach() if bias else torch.zeros(48)
    assert torch.equal(found["output"], expected.expand(33, -1))
    assert torch.equal(found["input"], torch.zeros(33, 64))
    assert found["f.weight"].any()


SCALES = [1e-30, 1e-12, 1e4, 1e30]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4_rht", "tetrajet2"])
def test_any_magnitude(recipe: str, scale: float) -> None:
    found = trained(One(bias=False), scale * torch.randn(33, 64, generator=torch.Generator().manual_seed(1)), recipe)
    assert all(v.isfinite().all() for v in found.values())
    assert all(v.any() for v in found.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2", "mxfp8"])
def test_a_value_that_is_not_finite_stays_in_its_row(recipe: str, value: float) -> None:
    """In the forward: other rows' outputs are those of other rows, whatever one row holds."""
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1))
    x[5, 9] = value
    found = trained(One(), x, recipe)
    assert found["output"][5].isnan().all()
    assert found["output"][[i for i in range(33) if i != 5]].isfinite().all()
    assert found["input"].isfinite().all()


def test_unequal_sees_a_difference() -> None:
    """The comparison itself: another seed is another gradient."""
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1))
    policy = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
    assert unequal(interpreted(One(), x, policy), interpreted(One(), x, policy, seed=1)) != []
