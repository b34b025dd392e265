"""Products of a stack of experts in a joint graph: ``_grouped_mm`` and the fallback transformers has for it, normalized.

Whatever form the graph has, `operands` says a call as (first, second): X and W for fprop, dY and W for dgrad, dY and X for
wgrad, with W (E, N, K) and the others (T, features).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, root, tensor_of

aten = torch.ops.aten
FALLBACK = "transformers::grouped_mm_fallback"  # opaque to Inductor: for dtypes its own _grouped_mm has no code for


@dataclass(frozen=True)
class Call:
    """A grouped product as the graph has it: out = left @ right, per group. `node` holds the result.

    left: (T, C), or (C, T) where both are matrices. right: (E, C, columns), or (T, columns).
    transposed: of left and right, is it the transpose of the node that is meant?
    """

    node: Node
    left: Node
    right: Node
    offs: Node
    transposed: tuple[bool, bool] = (False, False)

    @property
    def weight_gradient(self) -> bool:
        value = tensor_of(self.right)
        return value is not None and value.dim() == 2


def _name(node: Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""


def is_product(node: Node) -> bool:
    """Does the node hold the result of a product of a stack of experts?"""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        made: Any = node.args[0]
        return made.op == "call_function" and _name(made) == f"{FALLBACK}_backward"
    return node.target is aten._grouped_mm.default or _name(node) == FALLBACK


def calls(graph: Graph) -> Iterator[Call | tuple[Node, str]]:
    """Every grouped product of the graph, or its node and why it is not understood."""
    node: Any
    for node in graph.nodes:
        if not is_product(node) or "fp4" in node.meta:
            continue
        if node.target is operator.getitem:
            x, w, offs, dy = node.args[0].args
            if node.args[1] == 0:
                yield Call(node, dy, w, offs, (False, True))
            else:
                yield Call(node, x, dy, offs, (True, False))
            continue
        left, right, *rest = node.args
        offs, bias, out_dtype = (*rest, None, None, None)[:3]
        dims = tensor_of(left).dim(), tensor_of(right).dim()  # type: ignore[union-attr]
        if offs is None or bias is not None or out_dtype is not None or node.kwargs or dims not in ((2, 3), (2, 2)):
            yield node, f"a grouped product of {dims[0]}-D by {dims[1]}-D operands, or with a bias: not understood"
        else:
            yield Call(node, left, right, offs)


def seq_nr(call: Call) -> Any:
    made: Any = call.node.args[0] if call.node.target is operator.getitem else call.node
    return made.meta.get("seq_nr")


def gradient(call: Call, from_tangent: set[Node]) -> Node | None:
    """The operand that is dY: the one that depends on a tangent, where just one does."""
    found = [n for n in (call.left, call.right) if n in from_tangent]
    return found[0] if len(found) == 1 else None


def backward_role(call: Call, forward: Call, from_tangent: set[Node]) -> str | None:
    """Is the call the dgrad or the wgrad of `forward`? None where the dataflow says neither."""
    dy = gradient(call, from_tangent)
    if dy is None:
        return None
    other = root(call.right if dy is call.left else call.left)
    if call.weight_gradient:
        return "wgrad" if other is root(forward.left) else None
    return "dgrad" if dy is call.left and other is root(forward.right) else None


def operands(build: Builder, role: str, call: Call, from_tangent: set[Node]) -> tuple[Node, Node, bool]:
    """The role's first and second operand, and whether the graph has the result's last two dimensions the other way."""
    if role != "wgrad":
        # The graph multiplies by (E, C, columns): W^T in fprop, W in dgrad.
        as_stored = (role == "dgrad") != call.transposed[1]
        return call.left, call.right if as_stored else swapped(build, call.right), False
    left = call.left if call.transposed[0] else swapped(build, call.left)
    gradient_is_left = call.left in from_tangent
    return (left, call.right, False) if gradient_is_left else (call.right, left, True)


def swapped(build: Builder, node: Node) -> Node:
    """The node's last two dimensions exchanged, undoing a transpose rather than stacking a second one."""
    rank = tensor_of(node).dim()  # type: ignore[union-attr]
    if node.target is aten.transpose.int and {int(d) % rank for d in node.args[1:3]} == {rank - 2, rank - 1}:  # type: ignore[arg-type]
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.permute.default:
        order = [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr, arg-type]
        if order == [*range(rank - 2), rank - 1, rank - 2]:
            return node.args[0]  # type: ignore[return-value]
    return build.call(aten.transpose.int, node, -2, -1)
