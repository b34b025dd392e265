"""Whole models from their libraries' configurations: output and every gradient equal the eager oracle's, bit for bit.

The rewritten graph, undecomposed, is run by ATen's kernels. The oracle runs the library's own eager code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.report import Report
from tests.graphs import Captured, capturing, compiled, unequal
from tests.models import zoo
from tests.models.oracle import Calls, oracle

# Inductor's own decompositions round a norm or a softmax otherwise than ATen's kernels do.
ATEN: dict[str, Any] = {"fallback_random": True, "fallback_by_default": True, "selective_decompose": True}
# With those; its graphs know names and sequence numbers, which mode "lite" drops.
USUAL: dict[str, Any] = {"fallback_random": True}
FAST = ("gpt2", "t5", "mixtral, grouped_mm", "lora")


def everything(name: str = "nvfp4") -> fp4.Policy:
    return fp4.recipe(name, keep_heads=False, high_precision_tail=0.0)


def step(model: nn.Module, run: Any, inputs: dict[str, Any], autocast: bool, start: Any = None) -> dict[str, Tensor]:
    """Output and gradients of one step. start: called just before forward."""
    model.zero_grad()
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if start is not None:
            start()
        y = run(**inputs)
    y = y if isinstance(y, Tensor) else y.logits
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return {"output": y.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(
    model: nn.Module,
    inputs: dict[str, Any],
    recipe: str = "nvfp4",
    autocast: bool = False,
    settings: dict[str, Any] = ATEN,
    **how: Any,
) -> Report:
    """Assert that model and oracle agree in every bit; returns the report."""
    torch._dynamo.reset()
    with capturing(Captured()):
        run = compiled(model, policy=everything(recipe), inductor=settings, **how)
        ours = step(model, run, inputs, autocast)
    report = fp4.report(model)
    calls = Calls(sum(len(g.linears) for g in report.graphs), recipe)
    with oracle(calls):
        theirs = step(model, model, inputs, autocast, calls.start)
    assert calls.index == calls.linears, "the model and its graphs have as many linears"
    assert unequal(ours, theirs) == []
    return report


def cases() -> list[Any]:
    found = []
    for name in zoo.MODELS:
        for autocast in (False, True):
            fast = name in FAST and autocast
            found.append(pytest.param(name, autocast, marks=() if fast else pytest.mark.slow, id=f"{name}-{autocast}"))
    return found


@pytest.mark.parametrize(("name", "autocast"), cases())
def test_model(name: str, autocast: bool) -> None:
    report = compare(zoo.make(name), zoo.inputs(name), autocast=autocast)
    (graph,) = report.graphs
    assert report.uncaptured == []
    # Whatever has a gradient is quantized, and only a convolution is not a linear.
    for linear in graph.linears:
        assert all(g.quantized or g.reason == "no gradient is asked for" for g in linear.gemms), linear
    assert all("convolution" in reason for reason in graph.unknown)
    assert len(graph.unknown) == (1 if name in ("vit", "mamba2") else 0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quartet2", "quartet", "mxfp4_rht"])
def test_mixtral_with_other_recipes(recipe: str) -> None:
    compare(zoo.make("mixtral, grouped_mm"), zoo.inputs("mixtral, grouped_mm"), recipe, autocast=True)


def test_bfloat16_parameters_take_the_library_s_own_grouped_mm() -> None:
    compare(zoo.make("mixtral, grouped_mm").to(torch.bfloat16), zoo.inputs("mixtral, grouped_mm"))


@pytest.mark.slow
def test_experts_as_a_loop_over_hit_experts_are_reported() -> None:
    """Dynamo does not trace a loop over data: nothing of the experts is in a graph, and the report names them."""
    torch.manual_seed(0)
    model = zoo._mixtral("eager")
    torch._dynamo.reset()
    with capturing(Captured()):
        step(model, compiled(model, policy=everything()), zoo.inputs("mixtral"), autocast=False)
    report = fp4.report(model)
    experts = "model.layers.0.mlp.experts"
    assert report.uncaptured == [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    names = [linear.name for graph in report.graphs for linear in graph.linears]
    attention = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]
    assert names == [*attention, "model.layers.0.mlp.gate", "lm_head"], "names are the model's behind a graph break too"


@pytest.mark.slow
def test_experts_gathered_a_token_are_reported() -> None:
    torch.manual_seed(0)
    model = zoo._mixtral("batched_mm")
    torch._dynamo.reset()
    with capturing(Captured()):
        step(model, compiled(model, policy=everything()), zoo.inputs("mixtral"), autocast=False)
    (graph,) = fp4.report(model).graphs
    assert len(graph.linears) == 6
    assert [("experts_implementation='grouped_mm'" in r, n) for r, n in graph.unknown.items()] == [(True, 2), (True, 2)]
