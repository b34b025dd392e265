"""pytorch#141881: low-precision copies of every weight lived from forward to backward. Here that is an option."""

from __future__ import annotations

import pytest
import torch

import fp4
from fp4.compiler.backend import Options
from tests.graphs import MLP, rewritten, saved

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
ROWS = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0, weight_block=(1, 16))
WEIGHTS = {(96, 64), (64, 96), (64, 64)}


def of_weight_shape(policy: fp4.Policy, autocast: bool, save_weights: bool) -> list[tuple[int, ...]]:
    """Saved tensors of a weight's own size, codes counted by the elements they hold, parameters left out. 160 tokens: no
    activation has a weight's size."""
    x = torch.randn(160, 64, requires_grad=True)
    got = rewritten(MLP(), x, policy=policy, autocast=autocast, save_weights=save_weights)
    found = []
    for node in saved(got):
        value = node.meta["val"]
        if node.op != "placeholder" and value.dim() == 2:
            columns = value.shape[1] * (2 if value.dtype == torch.uint8 else 1)
            found.append((value.shape[0], columns))
    return [s for s in found if s in WEIGHTS or s[::-1] in WEIGHTS]


@pytest.mark.parametrize("policy", [ALL, ROWS], ids=["16x16", "1x16"])
@pytest.mark.parametrize("autocast", [False, True])
def test_none_unless_asked_for(policy: fp4.Policy, autocast: bool) -> None:
    assert of_weight_shape(policy, autocast, False) == []


@pytest.mark.parametrize("autocast", [False, True])
def test_one_each_when_asked_for(autocast: bool) -> None:
    assert len(of_weight_shape(ALL, autocast, True)) == 3


def test_the_option_is_documented() -> None:
    assert "save_weights: keep the weights' codes between forward and backward" in str(Options.__doc__)
