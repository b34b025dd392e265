"""On a CUDA GPU: ``fp4::mm`` of BF16 operands without a bias becomes ``fp4::product``, scaled and rounded to BF16 by cuBLAS.

Others go through an FP32 result: twice the bytes written, and read again; so do those with a tensor scale where cuBLASLt cannot
be called (runtime/cublas.py). cuBLAS may reduce the parts of a split BF16 sum in BF16; the op forbids it, as a graph of ATen
products could not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, fp4_nodes
from fp4.runtime import cublas

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class LowerProducts:
    """target: a named GPU architecture, whatever the device of the graph; None: on a CUDA device alone."""

    name: ClassVar[str] = "lower_products"
    target: str | None = None

    def run(self, graph: Graph) -> bool:
        found = [node for node in fp4_nodes(graph, "mm") if _plain(node) and (self.target or _on_cuda(node))]
        for node in found:
            product = Builder(graph, node).call(fp4.product.default, *node.args[:3])
            product.meta = {**node.meta, "val": product.meta["val"]}
            node.replace_all_uses_with(product)
            graph.erase_node(node)
        return bool(found)


def _plain(node: Node) -> bool:
    a, b, alpha, bias, dtype = node.args
    operands: Any = [n.meta["val"].dtype for n in (a, b)]  # type: ignore[union-attr]
    if {*operands, dtype} != {torch.bfloat16} or bias is not None:
        return False
    return alpha is None or cublas.available(node.meta["val"].device)


def _on_cuda(node: Node) -> bool:
    return bool(node.meta["val"].device.type == "cuda")
