"""Quantize and dequantize the operands the policy quantizes: ``amax -> quantize -> dequantize -> fp4::mm``.

The decoded operand is code times block scale (exact in BF16 for the FP4 formats); the tensor scales are the GEMM's alpha,
applied to the FP32 accumulator. This is the reference form: it means the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, aten
from fp4.compiler.operands import operand_site, place
from fp4.compiler.pipeline import Context
from fp4.compiler.sites import GemmSite, Linear
from fp4.runtime.spec import Quantizer

ALPHA = 2  # argument of fp4::mm


@dataclass(frozen=True)
class InsertQuantize:
    name: ClassVar[str] = "insert_quantize"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for linear, decision in zip(context.linears, context.decisions, strict=True):
            precisions = decision.precision.gemms()
            for role, gemm in linear.gemms.items():
                scales = []
                for operand, spec in enumerate((precisions[role].first, precisions[role].second)):
                    if spec.quantizer is not None:
                        scales += _quantize(graph, context, linear, gemm, operand, spec.quantizer)
                        changed = True
                if scales:
                    build = Builder(graph, gemm.node)
                    alpha = scales[0] if len(scales) == 1 else build.call(aten.mul.Tensor, *scales)
                    gemm.node.update_arg(ALPHA, alpha)
        return changed


def _quantize(
    graph: Graph, context: Context, linear: Linear, gemm: GemmSite, operand: int, quantizer: Quantizer
) -> list[Node]:
    """Quantize one operand of a GEMM; returns its tensor scale, if it has one."""
    rotated: Node = gemm.node.args[gemm.slot(operand)]  # type: ignore[assignment]
    if rotated.target is torch.ops.fp4.rotate.default:
        build, matrix = Builder(graph, rotated, before=rotated.next), rotated
    else:
        build, matrix = place(graph, context, linear, gemm, operand)
    amax = build.call(torch.ops.fp4.amax.default, matrix) if quantizer.needs_amax else None
    seed = context.seed(graph) if quantizer.needs_seed else None
    # A deterministic quantizer has site 0, so that equal calls are one call. The backward's own copy of a weight keeps its
    # site: else CSE would merge it with the forward's and save the codes.
    own_copy = build.meta.get("partitioner_tag") == "must_be_in_backward"
    site = operand_site(linear, gemm.role, operand) if quantizer.needs_seed or own_copy else 0
    columns = build.size(matrix, 1)
    quantized = build.call(torch.ops.fp4.quantize.default, matrix, amax, str(quantizer), seed, site)
    codes, block_scales, tensor_scale = build.outputs(quantized)
    dtype = torch.bfloat16 if quantizer.exact_in_bf16 else torch.float32
    decoded = Builder(graph, gemm.node).call(
        torch.ops.fp4.dequantize.default, codes, block_scales, None, str(quantizer), columns, dtype
    )
    gemm.node.update_arg(gemm.slot(operand), decoded)
    return [tensor_scale] if quantizer.has_tensor_scale else []
