"""pytorch#190758: with a small activation memory budget backward redrew random numbers that forward had drawn."""

from __future__ import annotations

import pytest
import torch

import fp4
from tests.graphs import MLP, interpreted, rewritten, unequal

SR = fp4.Operand(fp4.NVFP4(rounding="stochastic"))
GEMM = fp4.GemmPrecision(SR, SR)
EVERY = fp4.Policy("every", fp4.LinearPrecision(GEMM, GEMM, GEMM))
FORWARD = fp4.Policy("forward", fp4.LinearPrecision(GEMM, fp4.BF16, fp4.BF16))
NVFP4 = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("policy", [EVERY, FORWARD, NVFP4], ids=lambda p: p.name)
def test_the_seed_is_drawn_once(policy: fp4.Policy, budget: float) -> None:
    with torch._functorch.config.patch(activation_memory_budget=budget):
        got = rewritten(MLP(), torch.randn(32, 64, requires_grad=True), policy=policy)
    calls = [n for gm in (*got.forward, *got.backward) for n in gm.graph.nodes if n.op == "call_function"]
    assert sum("fp4.seed" in str(n.target) for n in calls) == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("policy", [EVERY, NVFP4], ids=lambda p: p.name)
def test_gradients_do_not_depend_on_the_budget(policy: fp4.Policy, autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(32, 64)
    found = []
    for budget in (1.0, 0.5, 0.0):
        with torch._functorch.config.patch(activation_memory_budget=budget):
            found.append(interpreted(model, x, policy, autocast))
    assert unequal(found[0], found[1]) == []
    assert unequal(found[0], found[2]) == []
