"""tag_gemms: fills the context, and changes nothing. What it finds is in tests/compiler/test_sites.py."""

from __future__ import annotations

import torch

import fp4
from fp4.passes.tag_gemms import TagGemms
from tests.graphs import MLP, before, rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


def test_the_graph_stays_and_the_context_fills() -> None:
    graph, context = before(rewritten(MLP(), torch.randn(32, 64, requires_grad=True), policy=ALL), "tag_gemms")
    text = str(graph)
    assert not context.linears
    assert not TagGemms().run(graph, context)
    assert str(graph) == text
    assert [linear.site.name for linear in context.linears] == ["a", "b", "c"]
    assert {len(linear.gemms) for linear in context.linears} == {3}


def test_tagging_again_finds_the_same() -> None:
    graph, context = before(rewritten(MLP(True), torch.randn(32, 64, requires_grad=True), policy=ALL), "tag_gemms")
    TagGemms().run(graph, context)
    first = context.linears
    TagGemms().run(graph, context)
    assert context.linears == first
    assert context.linears is not first


def test_decided_products_are_not_found_again() -> None:
    """A nested region's graphs come by twice: a GEMM with a decision is nobody's linear."""
    graph, context = before(
        rewritten(MLP(), torch.randn(32, 64, requires_grad=True), policy=fp4.recipe("bf16")), "insert_rotation"
    )
    assert len(context.linears) == 3
    TagGemms().run(graph, context)
    assert context.linears == []
    assert context.unknown == []
