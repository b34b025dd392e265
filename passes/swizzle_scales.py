"""A quantize kernel writes its block scales in the tensor cores' order where nothing reads them in another.

``rotate_quantize -> swizzle_rows`` becomes ``rotate_quantize(swizzled=True)``: no scale is moved afterwards. Runs after
``lower_emulated``, which makes the kernels. Scales that backward reads, or a clip mask, stay as they are beside their swizzled
copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, fp4_nodes

fp4 = torch.ops.fp4
SWIZZLED = 8  # argument of fp4::rotate_quantize


@dataclass(frozen=True)
class SwizzleScales:
    name: ClassVar[str] = "swizzle_scales"

    def run(self, graph: Graph) -> bool:
        changed = [_swizzle(graph, node) for node in list(fp4_nodes(graph, "rotate_quantize"))]
        return any(changed)


def _swizzle(graph: Graph, node: Node) -> bool:
    results = {u.args[1]: u for u in node.users}
    readers = list(results[1].users) if 1 in results else []
    if not readers or any(u.target is not fp4.swizzle_rows.default for u in readers):
        return False
    build = Builder(graph, node)
    new = build.outputs(build.call(fp4.rotate_quantize.default, *node.args[:SWIZZLED], True))
    for reader in readers:
        reader.replace_all_uses_with(new[1])
        graph.erase_node(reader)
    for i, old in results.items():
        old.replace_all_uses_with(new[i])  # type: ignore[index]
        graph.erase_node(old)
    graph.erase_node(node)
    return True
