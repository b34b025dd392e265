"""What must hold of a graph between two passes: a table of (op, rule). A broken rule is a bug here, never a user's mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4.compiler.graph import fp4_nodes
from fp4.runtime.spec import Quantizer, Rotation


class VerifyError(AssertionError):
    """A pass left the graph in a state that cannot be right."""


def _shape(node: Node) -> torch.Size:
    return node.meta["val"].shape


def _has_val(node: Node) -> bool:
    return "val" in node.meta


def _tagged_like_neighbours(node: Node) -> bool:
    """In a training graph every node of ours has a partitioner tag, else it is recomputed or saved at random.

    Inductor's mode "lite" leaves tags on nothing but products, and ours keep them.
    """
    products = torch.ops.fp4.mm.default, torch.ops.aten.mm.default
    training = any("partitioner_tag" in n.meta for n in node.all_input_nodes if n.target not in products)
    return not training or "partitioner_tag" in node.meta


def _checkpoint_tags(node: Node) -> bool:
    """A node tagged for recomputation also names its checkpoint region; a decode that our passes repeat, and the seed, have
    none."""
    ours = node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE)
    return "recompute" not in node.meta or "ac_graph_id" in node.meta or ours


def _matrix(node: Node) -> bool:
    return len(_shape(node.args[0])) == 2  # type: ignore[arg-type]


def _known_quantizer(node: Node) -> bool:
    q = Quantizer.parse(str(node.args[2]))
    return (node.args[1] is not None or not q.needs_amax) and (node.args[3] is not None) >= q.needs_seed


def _known_rotation(node: Node) -> bool:
    return (node.args[2] is not None) >= Rotation.parse(str(node.args[1])).needs_seed


def _codes_are_bytes(node: Node) -> bool:
    return node.args[0].meta["val"].dtype == torch.uint8  # type: ignore[union-attr]


def _inner_dimensions_agree(node: Node) -> bool:
    a, b = (_shape(n) for n in node.args[:2])  # type: ignore[arg-type]
    return bool(a[1] == b[1]) and tuple(_shape(node)) == (a[0], b[0])


def _has_its_dtype(node: Node) -> bool:
    return bool(node.meta["val"].dtype == node.args[-1])


def _operands_rotated_alike(node: Node) -> bool:
    """Both operands of a product rotated with one sign vector, or neither: else the rotation does not cancel."""
    return _rotation(node.args[0]) == _rotation(node.args[1])


def _rotation(operand: Any) -> tuple[Any, ...] | None:
    """Specification, seed and draw site of the rotation of a product's operand, below its quantizer."""
    if operand.target is torch.ops.fp4.dequantize.default:
        operand = operand.args[0].args[0].args[0]  # its codes, their quantize, the matrix
    if operand.target is not torch.ops.fp4.rotate.default:
        return None
    _, rotation, seed, site = operand.args
    return rotation, seed, site if Rotation.parse(str(rotation)).needs_seed else 0


ANY = "any"
RULES: tuple[tuple[str, Callable[[Node], bool]], ...] = (
    (ANY, _has_val),
    (ANY, _tagged_like_neighbours),
    (ANY, _checkpoint_tags),
    ("quantize", _matrix),
    ("quantize", _known_quantizer),
    ("rotate", _matrix),
    ("rotate", _known_rotation),
    ("dequantize", _codes_are_bytes),
    ("mm", _inner_dimensions_agree),
    ("mm", _has_its_dtype),
    ("mm", _operands_rotated_alike),
)


def verify(graph: Graph, stage: str) -> None:
    """Raise VerifyError, naming the stage, the node and the rule, when a rule does not hold."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"after {stage}: {error}") from error
    for node in fp4_nodes(graph):
        for op, rule in RULES:
            if op in (ANY, node.target._opname) and not rule(node):  # type: ignore[union-attr]
                raise VerifyError(f"after {stage}: {node.format_node()} breaks {rule.__name__.strip('_')}")
