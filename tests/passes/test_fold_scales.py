"""fold_scales: the second quantizer writes the product of two tensor scales, bit for bit, where nothing else reads its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fp4
import fp4.kernels.ops  # registers the ops
from fp4.compiler.graph import aten, fp4_nodes
from fp4.passes.fold_scales import FoldScales
from fp4.passes.lower_emulated import LowerEmulated
from tests.graphs import MLP, equal, evaluate, gaussians, rewritten

DRAWS = ("", None, 0, 0, False, torch.bfloat16)  # of fp4::fake_quantize: no rotation, no draws


def emulated(name: str) -> list[Graph]:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    policy = fp4.recipe(name, keep_heads=False, high_precision_tail=0.0)
    got = rewritten(MLP(), x, policy=policy, autocast=True)
    graphs = [got.forward[0].graph, got.backward[0].graph]
    for graph in graphs:
        LowerEmulated(device="cpu").run(graph)
    return graphs


def folded(graph: Graph) -> tuple[bool, Graph]:
    copied = GraphModule(graph.owning_module or torch.nn.Module(), copy.deepcopy(graph)).graph
    changed = FoldScales().run(copied)
    copied.lint()
    return changed, copied


def factors(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=aten.mul.Tensor))


@pytest.mark.parametrize("name", ["nvfp4", "all_the_way"])
def test_no_scale_is_multiplied_alone(name: str) -> None:
    for graph in emulated(name):
        changed, new = folded(graph)
        assert changed
        products = len(list(fp4_nodes(new, "mm")))
        given = sum(len(n.args) == 10 for n in fp4_nodes(new, "fake_quantize"))
        assert factors(graph) - factors(new) == products == given
        for product in fp4_nodes(new, "mm"):
            assert product.args[2].args[0].target is torch.ops.fp4.fake_quantize.default  # type: ignore[union-attr]


def test_results_are_equal() -> None:
    graph = emulated("nvfp4")[0]
    inputs = gaussians(graph)
    assert equal(evaluate(graph, inputs), evaluate(folded(graph)[1], inputs))


def traced(function: Any) -> Graph:
    x = torch.randn(32, 64)
    return make_fx(function, tracing_mode="fake")(x, x.clone(), torch.tensor(2.0)).graph


def scale(x: Tensor, amax: Tensor, quantizer: str = "nvfp4") -> Tensor:
    return torch.ops.fp4.fake_quantize(x, amax, quantizer, *DRAWS)[1]


def test_a_scale_that_is_read_twice_stays() -> None:
    def function(x: Tensor, y: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        a, b = scale(x, amax), scale(y, amax)
        return a * b, a + 1.0, b + 1.0

    assert not folded(traced(function))[0]


def test_the_second_of_two_writes_their_product() -> None:
    def function(x: Tensor, y: Tensor, amax: Tensor) -> Tensor:
        first, second = scale(x, amax), scale(y, amax * 3.0)
        return first * second

    graph = traced(function)
    changed, new = folded(graph)
    assert changed
    first, second = fp4_nodes(new, "fake_quantize")
    assert (len(first.args), len(second.args)) == (9, 10)
    inputs = [torch.randn(32, 64), torch.randn(32, 64), torch.tensor(2.0)]
    assert equal(evaluate(graph, inputs), evaluate(new, inputs))


@pytest.mark.parametrize("quantizer", ["mxfp4", "nvfp4[outer=128]", "nvfp4[tensor_scale=no]"])
def test_only_a_tensor_scale_that_the_kernel_computes(quantizer: str) -> None:
    def function(x: Tensor, y: Tensor, amax: Tensor) -> Tensor:
        return scale(y, amax, quantizer) * amax

    assert not folded(traced(function))[0]
