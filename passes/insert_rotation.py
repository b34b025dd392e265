"""Put ``fp4::rotate`` on both operands of every GEMM whose precision has a rotation.

The two share one sign vector (one draw site a GEMM), so the rotation cancels in the product; numerics change only by the
rounding of the rotated values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph

from fp4.compiler.operands import place, signs_site
from fp4.compiler.pipeline import Context


@dataclass(frozen=True)
class InsertRotation:
    name: ClassVar[str] = "insert_rotation"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for linear, decision in zip(context.linears, context.decisions, strict=True):
            precisions = decision.precision.gemms()
            for role, gemm in linear.gemms.items():
                rotation = precisions[role].rotation
                if rotation is None:
                    continue
                seed = context.seed(graph) if rotation.needs_seed else None
                site = signs_site(linear, role) if rotation.needs_seed else 0
                for operand in (0, 1):
                    build, matrix = place(graph, context, linear, gemm, operand)
                    rotated = build.call(torch.ops.fp4.rotate.default, matrix, str(rotation), seed, site)
                    gemm.node.update_arg(gemm.slot(operand), rotated)
                changed = True
        return changed
