"""axolotl#3721: a model could not be saved once it was prepared for quantized training."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import fp4
from tests.graphs import MLP, interpreted, rewritten, unequal

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


@pytest.mark.parametrize("recipe", sorted(fp4.recipes()))
def test_every_recipe_pickles(recipe: str) -> None:
    policy = fp4.recipe(recipe).with_rules(fp4.keep("lm_head"), fp4.keep_last(0.1), fp4.rule("*", wgrad=fp4.BF16))
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert again.digest() == policy.digest()
    assert copy.deepcopy(policy) == policy


def test_a_trained_model_is_saved_and_trains_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = MLP(True), torch.randn(32, 64)
    rewritten(model, x, policy=ALL)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert unequal(interpreted(again, x, ALL), interpreted(model, x, ALL)) == []


def test_the_state_dict_has_the_model_s_names_and_types() -> None:
    model = MLP(True)
    compiled = rewritten(model, torch.randn(32, 64), policy=ALL).model
    state = compiled.state_dict()
    assert {n.removeprefix("_orig_mod."): v.dtype for n, v in state.items()} == {
        n: torch.float32 for n, _ in model.named_parameters()
    }
    fresh = MLP(True)
    fresh.load_state_dict(model.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
