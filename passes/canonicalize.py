"""Equal views and casts of one tensor become one node; a batched product of batch 1, or with one repeated weight, becomes
``mm``. Neutral but for the order of a sum.

Why: q, k and v each make their own view (and, under autocast, their own cast) of one activation. One node means one
quantized copy. Inductor turns batch-1 ``bmm`` (an einsum with a weight) into ``mm`` only after this pass has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, Node

from fp4.compiler.graph import COPIES, VIEWS, Builder, aten
from fp4.compiler.pipeline import Context
from fp4.compiler.sites import is_batch_of_one

# A clone is kept: it exists to be a second tensor.
MERGED = (VIEWS | COPIES) - {aten.clone.default}


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_key(v) for v in value)
    if isinstance(value, Node | int | float | str | bool) or value is None:
        return (type(value), value)
    return (type(value), str(value))


@dataclass(frozen=True)
class Canonicalize:
    name: ClassVar[str] = "canonicalize"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in list(graph.nodes):
            if node.op == "call_function" and is_batch_of_one(node):
                _to_mm(graph, node)
                changed = True
            elif node.op == "call_function" and node.target is aten.bmm.default:
                changed |= _one_weight(graph, node)
        return _merge(graph) or changed


def _to_mm(graph: Graph, node: Node) -> None:
    build = Builder(graph, node)
    left, right = (build.call(aten.squeeze.dim, operand, 0) for operand in node.args)
    product = build.call(aten.mm.default, left, right)
    product.meta = {**node.meta, "val": product.meta["val"]}
    node.replace_all_uses_with(build.call(aten.unsqueeze.default, product, 0))
    graph.erase_node(node)


def _one_weight(graph: Graph, node: Node) -> bool:
    """A batched product whose right operand repeats one matrix is a product with that matrix.

    ``F.linear`` of a strided input and a frozen weight makes one.
    """
    left: Any = node.args[0]
    right: Any = node.args[1]
    swaps = right.target in (aten.permute.default, aten.transpose.int) and right.meta["val"].dim() == 3
    inner = right.args[0] if swaps else right
    while inner.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        inner = inner.args[0]
    shape = left.meta["val"].shape
    if inner.target is not aten.expand.default or not all(isinstance(n, int) for n in shape):
        return False
    matrix = inner.args[0]
    whole = right.meta["val"].shape
    expected = (whole[2], whole[1]) if swaps else (whole[1], whole[2])
    if matrix.meta["val"].dim() != 2 or tuple(matrix.meta["val"].shape) != expected:
        return False
    build = Builder(graph, node)
    flat = build.call(aten.reshape.default, left, [shape[0] * shape[1], shape[2]])
    product = build.call(aten.mm.default, flat, build.call(aten.permute.default, matrix, [1, 0]) if swaps else matrix)
    product.meta = {**node.meta, "val": product.meta["val"]}
    node.replace_all_uses_with(build.call(aten.view.default, product, [shape[0], shape[1], whole[2]]))
    graph.erase_node(node)
    return True


def _merge(graph: Graph) -> bool:
    seen: dict[Any, Node] = {}
    changed = False
    outputs = set(next(n for n in reversed(graph.nodes) if n.op == "output").all_input_nodes)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in MERGED or node in outputs:
            continue
        # Forward and backward copies stay apart: which of them is saved is the partitioner's choice. So do copies in
        # different checkpoint regions.
        region = (node.meta.get("partitioner_tag"), node.meta.get("ac_graph_id"), node.meta.get("recompute"))
        key = (node.target, _key(node.args), _key(sorted(node.kwargs.items())), region)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            changed = True
    return changed
