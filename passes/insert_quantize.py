"""Quantize and dequantize the operands the policy quantizes: ``amax -> quantize -> dequantize -> fp4::mm``.

The decoded operand is code times block scale (exact in BF16 for the FP4 formats); the tensor scales are the GEMM's alpha,
applied to the FP32 accumulator. This is the reference form: it means the same on every device. A GEMM that reads a
forward copy is left to ``requantize``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder
from fp4.compiler.operands import Quantized, operand_site, place, quantized, set_alpha
from fp4.compiler.pipeline import Context
from fp4.compiler.sites import GemmSite, Linear
from fp4.runtime.spec import Quantizer


@dataclass(frozen=True)
class InsertQuantize:
    name: ClassVar[str] = "insert_quantize"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for linear, _, gemm, precision in context.gemms():
            if precision.second.source == "forward":
                continue
            factors: list[Node] = []
            for operand, spec in enumerate((precision.first, precision.second)):
                if spec.quantizer is not None:
                    parts = _quantize(graph, context, linear, gemm, operand, spec.quantizer)
                    gemm.node.update_arg(gemm.slot(operand), parts.decoded(Builder(graph, gemm.node)))
                    factors += parts.factor
                    changed = True
            set_alpha(graph, gemm, factors)
        return changed


def _quantize(graph: Graph, context: Context, linear: Linear, gemm: GemmSite, operand: int, quantizer: Quantizer) -> Quantized:
    rotated: Node = gemm.node.args[gemm.slot(operand)]  # type: ignore[assignment]
    if rotated.target is torch.ops.fp4.rotate.default:
        build, matrix = Builder(graph, rotated, before=rotated.next), rotated
    else:
        build, matrix = place(graph, context, linear, gemm, operand)
    # A deterministic quantizer has site 0, so that equal calls are one call. The backward's own copy of a weight keeps its
    # site: else CSE would merge it with the forward's and save the codes.
    own_copy = build.meta.get("partitioner_tag") == "must_be_in_backward"
    site = operand_site(linear, gemm.role, operand) if quantizer.needs_seed or own_copy else 0
    return quantized(graph, context, build, matrix, quantizer, site, linear.where(gemm.role, operand))
