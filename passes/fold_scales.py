"""On a GPU: where a product's factor is two tensor scales multiplied, the second quantizer's kernel writes it.

A launch of its own for one number takes the host as long as any other.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import aten
from fp4.runtime.spec import Quantizer

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class FoldScales:
    name: ClassVar[str] = "fold_scales"

    def run(self, graph: Graph) -> bool:
        folded = [_fold(graph, node) for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor)]
        return any(folded)


def _fold(graph: Graph, product: Node) -> bool:
    first, second = product.args[:2]
    for scale, other in ((second, first), (first, second)):
        quantize = _quantizer_of(scale)
        if quantize is not None and isinstance(other, Node) and other < quantize and other.meta["val"].shape == ():
            quantize.args = (*quantize.args, other)
            product.replace_all_uses_with(scale)  # type: ignore[arg-type]
            graph.erase_node(product)
            return True
    return False


def _quantizer_of(scale: Any) -> Node | None:
    """The ``fp4::fake_quantize`` whose kernel writes this tensor scale, if nothing but one product reads it."""
    if not isinstance(scale, Node) or scale.target is not operator.getitem or scale.args[1] != 1 or len(scale.users) != 1:
        return None
    quantize: Any = scale.args[0]
    if quantize.target is not fp4.fake_quantize.default or len(quantize.args) != 9:
        return None
    return quantize if foldable(Quantizer.parse(str(quantize.args[2]))) else None


def foldable(q: Quantizer) -> bool:
    """Does its kernel compute a tensor scale, one number?"""
    return q.needs_amax and not q.outer
