"""lower_reference: every fp4 op becomes the oracle's ATen nodes; the graphs compute what the opaque ops do, bit for bit."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.passes.lower_reference import LowerReference
from tests.graphs import MLP, Captured, equal, evaluate, ops, rewritten

SR = fp4.NVFP4(rounding="stochastic")
EDEN = fp4.NVFP4(rounding="ms_eden")
FRESH = fp4.Rotation(size=128, signs="fresh", bf16=False)


def every(first: fp4.Quantizer, second: fp4.Quantizer | None = None, rotation: fp4.Rotation | None = None) -> fp4.Policy:
    gemm = fp4.GemmPrecision(fp4.Operand(first), fp4.Operand(second), rotation)
    return fp4.Policy("every", fp4.LinearPrecision(gemm, gemm, gemm))


POLICIES = {
    "nvfp4": fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0),
    "four over six": fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0, four_six=True),
    "ms-eden": every(EDEN, EDEN, rotation=FRESH),
    "mxfp4": every(fp4.MXFP4(), fp4.MXFP4(scale_rule="ceil", rounding="stochastic"), rotation=fp4.Rotation(size=32)),
    "quest": every(fp4.MXFP4(scale_rule="quest"), fp4.MXFP4(scale_rule="range_fit")),
    "mxfp8": every(fp4.MXFP8(), fp4.MXFP8(format="e5m2")),
    "fp8": every(fp4.FP8(), fp4.FP8(block=(128, 128))),
    "one operand": every(SR),
}


@cache
def captured(name: str, autocast: bool = False, dynamic: bool | None = None) -> Captured:
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    settings = {"fallback_random": True}
    return rewritten(MLP(True), x, policy=POLICIES[name], autocast=autocast, dynamic=dynamic, inductor=settings)


@cache
def lowered(gm: GraphModule) -> GraphModule:
    gm = copy.deepcopy(gm)
    assert LowerReference().run(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def concrete(gm: GraphModule, sizes: dict[str, int]) -> list[Any]:
    """Values for a forward graph's inputs: Gaussian tensors; symbolic sizes from `sizes`, in order."""
    generator = torch.Generator().manual_seed(5)
    values: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            values.append(sizes[str(value)])
        else:
            shape = [sizes[str(s)] if isinstance(s, torch.SymInt) else s for s in value.shape]
            values.append(torch.randn(shape, generator=generator).to(value.dtype))
    return values


def check(got: Captured, sizes: dict[str, int] | None = None) -> None:
    """Forward on random inputs; backward on what that forward saved and a random tangent."""
    (forward,), (backward,) = got.forward, got.backward
    inputs = concrete(forward, sizes or {})
    expected = evaluate(forward.graph, inputs)
    assert equal_mixed(evaluate(lowered(forward).graph, inputs), expected)
    names = [n.name for n in forward.graph.output_node().args[0]]  # type: ignore[union-attr]
    saved = dict(zip(names, expected, strict=True))
    tangent = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(6)).to(expected[0].dtype)
    inputs = [saved.get(n.name, tangent) for n in backward.graph.find_nodes(op="placeholder")]
    assert equal_mixed(evaluate(lowered(backward).graph, inputs), evaluate(backward.graph, inputs))


def equal_mixed(first: list[Any], second: list[Any]) -> bool:
    tensors = [[v for v in values if isinstance(v, Tensor)] for values in (first, second)]
    rest = [[v for v in values if not isinstance(v, Tensor)] for values in (first, second)]
    return rest[0] == rest[1] and equal(*tensors)


@pytest.mark.parametrize(("name", "autocast"), [*((name, False) for name in POLICIES), ("nvfp4", True), ("ms-eden", True)])
def test_same_bits_as_the_opaque_ops(name: str, autocast: bool) -> None:
    check(captured(name, autocast))


@pytest.mark.parametrize("batch", [1, 5])
def test_dynamic_shapes(batch: int) -> None:
    got = captured("nvfp4", dynamic=True)
    symbols = [
        str(n.meta["val"]) for n in got.forward[0].graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.SymInt)
    ]
    assert len(symbols) == 2
    check(got, dict(zip(symbols, (batch, 17), strict=True)))


@pytest.mark.parametrize(("name", "dynamic"), [*((name, None) for name in POLICIES), ("nvfp4", True)])
def test_no_op_of_ours_and_no_constant_is_left(name: str, dynamic: bool | None) -> None:
    got = captured(name, dynamic=dynamic)
    for gm in (*got.forward, *got.backward):
        assert list(fp4_nodes(gm.graph))
        low = lowered(gm)
        for module in low.modules():
            graph = getattr(module, "graph", None)
            if graph is None:
                continue
            assert not [n for n in fp4_nodes(graph) if n.target is not torch.ops.fp4.seed.default]
            for constant in graph.find_nodes(op="get_attr"):
                assert isinstance(getattr(module, constant.target), GraphModule)  # a subgraph, no tensor


def test_a_graph_without_our_ops_stays() -> None:
    got = rewritten(MLP(True), torch.randn(2, 20, 64, requires_grad=True), policy=fp4.recipe("bf16"))
    for gm in (*got.forward, *got.backward):
        text = str(gm.graph)
        assert not LowerReference().run(gm.graph)
        assert str(gm.graph) == text


def test_lowering_again_changes_nothing() -> None:
    gm = lowered(captured("nvfp4").backward[0])
    text = str(gm.graph)
    assert not LowerReference().run(gm.graph)
    assert str(gm.graph) == text


def test_equal_layers_share_their_subgraphs() -> None:
    """Four equal layers: as many subgraphs as two have, called more often."""

    def subgraphs(layers: int) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
        got = rewritten(model, torch.randn(32, 64, requires_grad=True), policy=POLICIES["nvfp4"])
        low = lowered(got.backward[0])
        calls = [n for n in low.graph.nodes if n.target is torch.ops.higher_order.invoke_subgraph]
        return len({n.args[1] for n in calls}), len(calls)

    (two, two_calls), (four, four_calls) = subgraphs(2), subgraphs(4)
    assert two == four
    assert four_calls == 2 * two_calls


def test_every_node_has_its_value() -> None:
    low = lowered(captured("nvfp4").forward[0])
    assert all("val" in n.meta for n in low.graph.nodes if n.op == "call_function")


def test_inference_graph() -> None:
    got = rewritten(MLP(True), torch.randn(2, 20, 64), policy=POLICIES["nvfp4"], train=False)
    (gm,) = got.inference
    inputs = concrete(gm, {})
    assert ops(gm.graph)["fp4::mm"] == 3
    assert equal(evaluate(lowered(gm).graph, inputs), evaluate(gm.graph, inputs))
