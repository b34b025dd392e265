"""Ask the policy for each linear's precision and mark every GEMM with the decision.

A GEMM to be quantized becomes ``fp4::mm(a, b, alpha, bias, dtype)``, both operands with the contracted dimension last, the
form block scales need; FP32 accumulation and one rounding, as ``mm`` has it. A GEMM left alone stays ``mm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, aten
from fp4.compiler.pipeline import Context
from fp4.compiler.sites import GemmSite


@dataclass(frozen=True)
class AssignPrecision:
    name: ClassVar[str] = "assign_precision"

    def run(self, graph: Graph, context: Context) -> bool:
        context.decisions, warnings = context.policy.assign([linear.site for linear in context.linears])
        context.warnings += warnings
        replaced: dict[Node, Node] = {}
        for linear, decision in zip(context.linears, context.decisions, strict=True):
            precisions = decision.precision.gemms()
            for role, gemm in linear.gemms.items():
                if precisions[role].quantized:
                    old = gemm.node
                    _to_fp4_mm(graph, gemm)
                    replaced[old] = gemm.node
                # The pass may meet this graph again (nested regions): a marked GEMM is decided.
                gemm.node.meta["fp4"] = f"{linear.site.name} {role}"
        for linear in context.linears:  # one linear's output may be the next one's operand
            linear.x, linear.w = replaced.get(linear.x, linear.x), replaced.get(linear.w, linear.w)
        for gemm in context.unknown:
            gemm.node.meta["fp4"] = f"unknown: {gemm.reason}"
        return bool(replaced)


def _to_fp4_mm(graph: Graph, gemm: GemmSite) -> None:
    node = gemm.node
    build = Builder(graph, node)
    bias = node.args[0] if node.target is aten.addmm.default else None
    left, right = node.args[-2:]
    product = build.call(torch.ops.fp4.mm.default, left, build.transposed(right), None, bias, node.meta["val"].dtype)  # type: ignore[arg-type]
    product.meta = {**node.meta, "val": product.meta["val"]}
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    gemm.node = product
