"""canonicalize: one node for equal views and casts, mm for a bmm of batch 1; bitwise neutral."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp4
from fp4.passes.canonicalize import Canonicalize
from tests.graphs import before, equal, evaluate, gaussians, ops, rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


class Model(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in "qkv")
        self.w = nn.Parameter(torch.randn(64, 96))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def qkv(m: Model, x: Tensor) -> Tensor:
    return m.q(x) * m.k(x) + m.v(x)


def einsum(m: Model, x: Tensor) -> Tensor:
    return torch.einsum("bsd,de->bse", x, m.w)


def prepared(code: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...] = (2, 32, 64), **how: Any) -> tuple[Any, Any]:
    return before(rewritten(Model(code), torch.randn(shape, requires_grad=True), policy=ALL, **how), "canonicalize")


def test_one_view_serves_q_k_and_v() -> None:
    graph, context = prepared(qkv)
    x = next(n for n in graph.find_nodes(op="placeholder") if n.meta["val"].shape == (2, 32, 64))
    assert len([u for u in x.users if u.target is torch.ops.aten.view.default]) == 3
    assert Canonicalize().run(graph, context)
    assert len(x.users) == 1


def test_one_cast_serves_q_k_and_v_under_autocast() -> None:
    graph, context = prepared(qkv, autocast=True)
    x = next(n for n in graph.find_nodes(op="placeholder") if n.meta["val"].shape == (2, 32, 64))
    assert len(x.users) == 3
    Canonicalize().run(graph, context)
    (cast,) = x.users
    (view,) = cast.users
    assert ops(graph)["prims::convert_element_type"] > 0
    assert view.meta["val"].dtype == torch.bfloat16


def test_a_product_of_batch_one_becomes_mm() -> None:
    graph, context = prepared(einsum)
    assert (ops(graph)["aten::bmm"], ops(graph)["aten::mm"]) == (3, 0)
    assert Canonicalize().run(graph, context)
    assert (ops(graph)["aten::bmm"], ops(graph)["aten::mm"]) == (0, 3)


@pytest.mark.parametrize(
    ("code", "shape"),
    [
        (lambda m, x: m.q(x), (32, 64)),  # nothing twice
        (lambda m, x: m.k(m.q(x).relu()), (32, 64)),
        (lambda m, x: torch.bmm(x, x.transpose(1, 2)) + m.q(x)[..., :32], (2, 32, 64)),  # batch 2
    ],
)
def test_the_rest_stays(code: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    graph, context = prepared(code, shape)
    text = str(graph)
    assert not Canonicalize().run(graph, context)
    assert str(graph) == text


def test_copies_in_two_checkpoint_regions_stay_apart() -> None:
    """Merged, the first region's tensor would be kept for the second's recomputation."""

    def code(m: Model, x: Tensor) -> Tensor:
        first = checkpoint(lambda y: m.q(y.transpose(0, 1)), x, use_reentrant=False)
        return first + checkpoint(lambda y: m.k(y.transpose(0, 1)), x, use_reentrant=False)

    graph, context = prepared(code)
    regions = {n.meta.get("ac_graph_id") for n in graph.nodes if "ac_graph_id" in n.meta}
    count = sum("ac_graph_id" in n.meta and n.target is torch.ops.aten.permute.default for n in graph.nodes)
    Canonicalize().run(graph, context)
    assert len(regions) == 2
    assert sum("ac_graph_id" in n.meta and n.target is torch.ops.aten.permute.default for n in graph.nodes) == count


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("code", [qkv, einsum])
def test_bitwise_neutral_and_idempotent(code: Callable[[Any, Tensor], Tensor], autocast: bool) -> None:
    graph, context = prepared(code, autocast=autocast)
    inputs = gaussians(graph)
    expected = evaluate(graph, inputs)
    assert Canonicalize().run(graph, context)
    assert equal(evaluate(graph, inputs), expected)
    text = str(graph)
    assert not Canonicalize().run(graph, context)
    assert str(graph) == text
