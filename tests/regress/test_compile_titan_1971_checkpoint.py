"""titan#1971, pytorch#186572: gradients changed with activation checkpointing, since recomputation drew or scaled anew.

Forward and recomputation have one seed and, amax being a maximum, one set of scales: the gradients are the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp4
from tests.graphs import MLP, compiled, interpreted, step, unequal

EDEN = fp4.NVFP4(rounding="ms_eden")
FRESH = fp4.Rotation(size=16, signs="fresh", bf16=False)
SR = fp4.NVFP4(rounding="stochastic")


def every(q: fp4.Quantizer, rotation: fp4.Rotation | None = None) -> fp4.Policy:
    gemm = fp4.GemmPrecision(fp4.Operand(q), fp4.Operand(q), rotation)
    return fp4.Policy("every", fp4.LinearPrecision(gemm, gemm, gemm))


POLICIES = {
    "nvfp4": fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0),
    "stochastic everywhere": every(SR),
    "fresh signs": every(EDEN, FRESH),
}


class Checkpointed(nn.Module):
    """Two blocks, each its own checkpoint region when `how` is one."""

    def __init__(self, how: Callable[..., Tensor], block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = block(), block()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.second, self.how(self.first, x))


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _save_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


HOW = {
    "all recomputed": partial(checkpoint, use_reentrant=False),
    "products saved": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_products)
    ),
}


def pair(how: Callable[..., Tensor], block: Callable[[], nn.Module] = MLP) -> tuple[Checkpointed, Checkpointed]:
    torch.manual_seed(0)
    model = Checkpointed(plain, block)
    other = copy.deepcopy(model)
    other.how = how
    return model, other


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("policy", "autocast"), [*((name, False) for name in POLICIES), ("nvfp4", True)])
def test_gradients_are_the_same_bits(policy: str, how: str, autocast: bool) -> None:
    model, checkpointed = pair(HOW[how])
    x = torch.randn(2, 16, 64)
    first = interpreted(model, x, POLICIES[policy], autocast)
    assert unequal(interpreted(checkpointed, x, POLICIES[policy], autocast), first) == []
    # Not for want of draws:
    assert unequal(interpreted(model, x, POLICIES[policy], autocast, seed=1), first) != []


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model, checkpointed = pair(HOW["all recomputed"], lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    x = torch.randn(2, 16, 64)
    found = []
    for m in (model, checkpointed):
        torch._dynamo.reset()
        settings: dict[str, Any] = {"policy": POLICIES["stochastic everywhere"], "inductor": {"fallback_random": True}}
        found.append(step(m, compiled(m, **settings), x))
    assert unequal(*found) == []
