"""Node builders and walks on a joint graph. Every node made here carries the metadata the partitioner and Inductor read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

import fp4.runtime.ops  # noqa: F401  registers the ops the passes name

aten = torch.ops.aten
prims = torch.ops.prims

# Ops that rename or copy a tensor without computing on it: a root is found by walking through their first argument.
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.alias.default,
        aten.expand.default,
        aten.squeeze.dim,
        aten.unsqueeze.default,
        aten.detach.default,
        aten.slice.Tensor,
    }
)
# Ops whose results are parts of their first argument.
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default})
COPIES = frozenset(
    {
        aten.clone.default,
        aten._to_copy.default,
        aten.contiguous.default,
        prims.convert_element_type.default,
    }
)

# What a node needs so that partitioner, activation checkpointing and error messages treat it as the node it serves:
# without `recompute`, checkpointing is silently defeated; without `val`, saving it costs infinitely much.
SERVED_META = (
    "partitioner_tag",
    "seq_nr",
    "recompute",
    "ac_graph_id",
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "autograd_backward",
    "custom",
)


def tensor_of(node: Node) -> torch.Tensor | None:
    """The node's fake tensor; None for anything else (a DeviceMesh also answers hasattr(val, 'shape'))."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_transpose(node: Any) -> bool:
    """Does the node swap the two dimensions of a matrix?"""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    value = tensor_of(node)
    if value is None or value.dim() != 2:
        return False
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        return [int(d) % 2 for d in node.args[1]] == [1, 0]  # type: ignore[union-attr, arg-type]
    return node.target is aten.transpose.int and {int(d) % 2 for d in node.args[1:3]} == {0, 1}  # type: ignore[arg-type]


def untransposed(node: Any) -> Node:
    """The matrix under a transpose, or the node itself."""
    return node.args[0] if is_transpose(node) else node


def root(node: Node) -> Node:
    """The tensor a node renames or copies: walks through views, casts and clones."""
    while node.op == "call_function" and (node.target in VIEWS or node.target in COPIES):
        node = node.args[0]  # type: ignore[assignment]
    return node


def source(node: Node) -> tuple[Node, str]:
    """The tensor a node is, or is a part of, and which part: "[2]" of a stack, "[0]" of a split; "" for the whole."""
    part = ""
    node = root(node)
    while node.op == "call_function":
        if node.target is aten.select.int:
            part, node = f"[{node.args[2]}]{part}", root(node.args[0])  # type: ignore[arg-type]
        elif node.target is operator.getitem and node.args[0].target in SPLITS:  # type: ignore[union-attr, operator]
            part, node = f"[{node.args[1]}]{part}", root(node.args[0].args[0])  # type: ignore[union-attr, arg-type]
        else:
            break
    return node, part


def descendants(starts: Iterable[Node]) -> set[Node]:
    """All nodes that depend on one of `starts`, those included."""
    found: set[Node] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.users)
    return found


def fp4_nodes(graph: Graph, name: str | None = None) -> Iterator[Node]:
    """The call nodes of the ``fp4::`` ops, or of one of them."""
    for node in graph.nodes:
        target = node.target
        if (
            node.op == "call_function"
            and isinstance(target, torch._ops.OpOverload)
            and target.namespace == "fp4"
            and (name is None or target._opname == name)
        ):
            yield node


class Builder:
    """Makes call nodes before a place in the graph, on behalf of one existing node whose metadata they take."""

    def __init__(self, graph: Graph, serves: Node, before: Node | None = None, **meta: Any) -> None:
        self.graph = graph
        self.before = before or serves
        self.meta = {k: serves.meta[k] for k in SERVED_META if k in serves.meta} | meta

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        """A node calling `target`; its `val` comes from running the op on the arguments' fake tensors."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args)
        values = tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, args)
        if target is operator.getitem:
            node.meta["val"] = values[0][values[1]]
        else:
            mode = next(
                (v.fake_mode for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch._subclasses.FakeTensor)),
                None,
            )
            if mode is None:
                raise AssertionError(f"{target} called with no tensor argument")
            with mode:
                node.meta["val"] = target(*values)
        node.meta.update(self.meta)
        return node

    def full(self, size: tuple[int, ...], value: int, dtype: torch.dtype, device: torch.device) -> Node:
        """A constant tensor, made where it is used: a ``get_attr`` constant is in no cache key."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(aten.full.default, (list(size), value), {"dtype": dtype, "device": device})
        model = next(n for n in self.graph.nodes if isinstance(n.meta.get("val"), torch._subclasses.FakeTensor))
        with model.meta["val"].fake_mode:
            node.meta.update(self.meta, val=torch.full(size, value, dtype=dtype, device=device))
        return node

    def outputs(self, node: Node) -> tuple[Node, ...]:
        """One getitem a result of a node that returns a tuple."""
        return tuple(self.call(operator.getitem, node, i) for i in range(len(node.meta["val"])))

    def size(self, node: Node, dimension: int) -> Node | int:
        """A tensor's size: a node where it is dynamic, since a bare SymInt is an input the partitioner doesn't see."""
        size = node.meta["val"].shape[dimension]
        return self.call(aten.sym_size.int, node, dimension) if isinstance(size, torch.SymInt) else size

    def transposed(self, matrix: Node) -> Node:
        """The matrix's transpose, undoing a transpose rather than stacking a second one."""
        if is_transpose(matrix):
            return matrix.args[0]  # type: ignore[return-value]
        return self.call(aten.permute.default, matrix, [1, 0])
