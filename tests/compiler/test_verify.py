"""verify refuses a broken graph and names the stage, the node and the rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.pipeline import Context
from fp4.compiler.verify import VerifyError, verify
from fp4.passes import JOINT_PASSES
from fp4.passes.insert_rotation import InsertRotation
from tests.graphs import rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


@cache
def _graph() -> Graph:
    return rewritten(nn.Linear(64, 96), torch.randn(32, 64, requires_grad=True), policy=ALL).joint.final


def first(graph: Graph, op: str, text: str = "") -> Node:
    return next(n for n in fp4_nodes(graph, op) if text in str(n.args))


def _wrong_tag(graph: Graph) -> None:
    del first(graph, "mm").meta["partitioner_tag"]


def _no_value(graph: Graph) -> None:
    del first(graph, "dequantize").meta["val"]


def _no_region(graph: Graph) -> None:
    first(graph, "quantize").meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _no_amax(graph: Graph) -> None:
    first(graph, "quantize").update_arg(1, None)


def _no_seed(graph: Graph) -> None:
    first(graph, "quantize", "stochastic").update_arg(3, None)


def _fresh_without_seed(graph: Graph) -> None:
    first(graph, "rotate").update_arg(1, "hadamard[signs=fresh]")


def _floats_for_codes(graph: Graph) -> None:
    node = first(graph, "dequantize")
    node.update_arg(0, node.args[0].args[0].args[0])  # type: ignore[union-attr]


def _inner_dimensions(graph: Graph) -> None:
    *_, last = fp4_nodes(graph, "mm")
    last.update_arg(1, first(graph, "mm").args[1])


def _vector(graph: Graph) -> None:
    node = first(graph, "quantize")
    node.update_arg(0, node.args[1])


def _another_dtype(graph: Graph) -> None:
    first(graph, "mm").update_arg(4, torch.bfloat16)


def _one_operand_rotated(graph: Graph) -> None:
    node = first(graph, "rotate")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


BROKEN: dict[str, Callable[[Graph], None]] = {
    "has_val": _no_value,
    "tagged_like_neighbours": _wrong_tag,
    "checkpoint_tags": _no_region,
    "known_quantizer": _no_amax,
    "known_quantizer 2": _no_seed,
    "known_rotation": _fresh_without_seed,
    "codes_are_bytes": _floats_for_codes,
    "inner_dimensions_agree": _inner_dimensions,
    "matrix": _vector,
    "has_its_dtype": _another_dtype,
    "operands_rotated_alike": _one_operand_rotated,
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule: str) -> None:
    graph = copy.deepcopy(_graph())
    verify(graph, "here")
    BROKEN[rule](graph)
    with pytest.raises(VerifyError, match=rf"(?s)after here: %.*breaks {rule.split()[0]}"):
        verify(graph, "here")


def test_an_unknown_specification_is_refused() -> None:
    graph = copy.deepcopy(_graph())
    first(graph, "quantize").update_arg(2, "nvfp5")
    with pytest.raises(fp4.SpecError, match="nvfp5"):
        verify(graph, "here")


def test_a_graph_out_of_order_is_refused() -> None:
    graph = copy.deepcopy(_graph())
    next(iter(graph.nodes)).append(first(graph, "mm"))
    with pytest.raises(VerifyError, match="after here"):
        verify(graph, "here")


@dataclass(frozen=True)
class UnsharedSigns:
    """The bug of a recipe that draws new signs for each operand: nothing crashes, and the product is noise."""

    name: ClassVar[str] = "insert_rotation"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = InsertRotation().run(graph, context)
        for i, node in enumerate(fp4_nodes(graph, "rotate")):
            node.update_arg(3, 1000 + i)
        return changed


@pytest.mark.parametrize("name", ["mxfp4_rht", "mxfp4_h16"])
def test_operands_with_signs_of_their_own_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [UnsharedSigns() if p.name == "insert_rotation" else p for p in JOINT_PASSES]
    monkeypatch.setattr("fp4.passes.JOINT_PASSES", passes)
    policy = fp4.recipe(name, keep_heads=False, **({"signs": "fresh"} if name == "mxfp4_h16" else {}))
    with pytest.raises(Exception, match="after insert_rotation: .*mm.*breaks operands_rotated_alike"):
        rewritten(nn.Linear(64, 96), torch.randn(32, 64, requires_grad=True), policy=policy)
