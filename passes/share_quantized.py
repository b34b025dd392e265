"""One quantized copy for equal calls: q, k and v read one activation; W and its transpose share square-block codes.

Bitwise neutral: only calls with equal arguments are merged (a random op's draw site is one of them), and a quantizer with
square blocks and nearest rounding gives the transpose's codes for the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4.compiler.graph import Builder, aten, fp4_nodes, is_transpose
from fp4.compiler.operands import whole_amax
from fp4.compiler.pipeline import Context
from fp4.runtime.spec import Quantizer

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class ShareQuantized:
    name: ClassVar[str] = "share_quantized"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = [_untranspose(graph, node) for node in list(fp4_nodes(graph, "quantize"))]
        merged = _merge(graph)
        _share_reductions(graph)
        _decode_again(graph)
        return any(changed) or merged


def _untranspose(graph: Graph, node: Node) -> bool:
    """quantize(W^T) with square blocks -> quantize(W), its decoded copy transposed."""
    matrix, amax, spec, seed, site = node.args
    if not is_transpose(matrix) or not Quantizer.parse(str(spec)).transposable:
        return False
    original: Node = matrix.args[0]  # type: ignore[assignment, union-attr]
    build = Builder(graph, node)
    reduced = isinstance(amax, Node) and amax.target is fp4.reduce_amax.default
    groups: Any = amax.args[1] if reduced else ()  # type: ignore[union-attr]
    new_amax = whole_amax(build, original, tuple(groups)) if isinstance(amax, Node) else None
    columns = build.size(original, 1)
    new = build.outputs(build.call(fp4.quantize.default, original, new_amax, spec, seed, site))
    for getitem in list(node.users):
        index: int = getitem.args[1]  # type: ignore[assignment]
        for user in list(getitem.users):
            if user.target is fp4.dequantize.default and user.args[0] is getitem:
                at = Builder(graph, user)
                decoded = at.call(fp4.dequantize.default, new[0], new[1], None, spec, columns, user.args[5])
                user.replace_all_uses_with(at.call(aten.permute.default, decoded, [1, 0]))
                graph.erase_node(user)
        if index == 2:
            getitem.replace_all_uses_with(new[2])
    dead_amax = [amax, *(amax.all_input_nodes if reduced else [])] if isinstance(amax, Node) else []
    for dead in [*node.users, node, *dead_amax]:
        if not dead.users:
            graph.erase_node(dead)
    return True


def _decode_again(graph: Graph) -> None:
    """Codes that forward and backward both read are decoded in each: else CSE keeps one decoded copy, and saves that."""
    for node in fp4_nodes(graph, "dequantize"):
        codes: Node = node.args[0]  # type: ignore[assignment]
        tags = {u.meta.get("partitioner_tag") for u in codes.users if u.target is fp4.dequantize.default}
        if len(tags) > 1 and node.meta.get("partitioner_tag") == "is_forward":
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)


def _share_reductions(graph: Graph) -> None:
    """One reduction over ranks for each tensor: backward reads forward's, four bytes, and waits for no one."""
    seen: dict[Any, Node] = {}
    for node in list(fp4_nodes(graph, "reduce_amax")):
        amax, groups = node.args
        first = seen.setdefault((amax.args[0], tuple(groups)), node)  # type: ignore[union-attr, arg-type]
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _merge(graph: Graph) -> bool:
    seen: dict[Any, Node] = {}
    changed = False
    for node in list(graph.nodes):
        target = node.target
        ours = node.op == "call_function" and getattr(target, "namespace", None) == "fp4"
        mine = ours or (node.op == "call_function" and any(a.target is fp4.quantize.default for a in node.all_input_nodes))
        mine = mine or (is_transpose(node) and any(u.target in (fp4.rotate.default, fp4.quantize.default) for u in node.users))
        if not mine or target is fp4.mm.default:
            continue
        region = tuple(node.meta.get(k) for k in ("partitioner_tag", "ac_graph_id", "recompute"))
        key = (target, tuple(a if isinstance(a, Node) else (type(a), str(a)) for a in node.args), region)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            changed = True
    return changed
