"""fp4.switch: another phase in the middle of a run, in place, one compile a phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp4
from fp4.compiler.backend import OptionError
from fp4.compiler.policy import PolicyError
from tests.graphs import Captured, capturing


def counts(got: Captured) -> list[tuple[str, int, int]]:
    """Policy name, quantized fprops and quantized wgrads of each compiled graph."""
    gemms = [(r.policy, [g for x in r.linears for g in x.gemms if g.quantized]) for r in got.reports]
    return [(name, sum(g.role == "fprop" for g in found), sum(g.role == "wgrad" for g in found)) for name, found in gemms]


def step(model: nn.Module, compiled: Callable[..., Any]) -> torch.Tensor:
    torch.manual_seed(3)
    model.zero_grad()
    y = compiled(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)))
    y.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_phases_there_and_back() -> None:
    """Each phase compiles once; the weights and the optimizer go on; going back gives the first phase's bits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 32, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    got = Captured()
    with capturing(got):
        compiled = torch.compile(model, backend="fp4", options={"recipe": "all_the_way"}, fullgraph=True)
        first = step(model, compiled)
        fp4.switch(compiled, "qaf")
        second = step(model, compiled)
        again = step(model, compiled)
        fp4.switch(compiled)
        back = step(model, compiled)
        optimizer.step()
        fp4.switch(compiled, "qaf")
        third = step(model, compiled)
    assert counts(got) == [("all_the_way", 2, 2), ("all_the_way:qaf", 2, 0)]
    assert torch.equal(first, back)
    assert torch.equal(second, again)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)  # the optimizer holds the same parameters, and moved them
    assert len(optimizer.state) == 2


def test_another_recipe_and_policy() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    got = Captured()
    with capturing(got):
        compiled = torch.compile(model, backend="fp4", options={"recipe": "all_the_way", "phase": "qaf"})
        step(model, compiled)
        fp4.switch(compiled, recipe="bf16")
        step(model, compiled)
        fp4.switch(compiled, policy=fp4.recipe("nvfp4", high_precision_tail=0.0))
        step(model, compiled)
    assert counts(got) == [("all_the_way:qaf", 2, 0), ("bf16", 0, 0), ("nvfp4", 2, 2)]


def test_errors_say_what_to_write() -> None:
    compiled = torch.compile(nn.Linear(32, 32), backend="fp4", options={"recipe": "all_the_way"})
    with pytest.raises(PolicyError, match="its phases: qaf"):
        fp4.switch(compiled, "warm")
    with pytest.raises(PolicyError, match="there is no recipe 'all'"):
        fp4.switch(compiled, recipe="all")
    with pytest.raises(OptionError, match="not both"):
        fp4.switch(compiled, recipe="bf16", policy=fp4.recipe("bf16"))
    with pytest.raises(OptionError, match="torch.compile"):
        fp4.switch(nn.Linear(32, 32), "qaf")
    with pytest.raises(OptionError, match="not OptimizedModule"):
        fp4.switch(torch.compile(nn.Linear(32, 32), backend="eager"), "qaf")


def test_phases_carry_rules() -> None:
    policy = fp4.recipe("nvfp4").with_rules(fp4.keep("a"))
    assert policy.phase("bf16_forward").rules[-1] == policy.rules[-1]
    mine = fp4.Policy("mine").with_phase("late", fp4.recipe("bf16"))
    assert mine.phase("late").name == "mine:late"
    with pytest.raises(PolicyError, match="write an fp4.Policy"):
        mine.with_phase("x", "bf16")  # type: ignore[arg-type]
