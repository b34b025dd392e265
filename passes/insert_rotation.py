"""Put ``fp4::rotate`` on both operands of every GEMM whose precision has a rotation.

The two share one sign vector (one draw site a GEMM), so the rotation cancels in the product; numerics change only by the
rounding of the rotated values. A GEMM that reads a forward copy is left to ``requantize``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from fp4.compiler.operands import place, rotated, signs_site
from fp4.compiler.pipeline import Context


@dataclass(frozen=True)
class InsertRotation:
    name: ClassVar[str] = "insert_rotation"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for linear, role, gemm, precision in context.gemms():
            rotation = precision.rotation
            if rotation is None or precision.second.source == "forward":
                continue
            site = signs_site(linear, role) if rotation.needs_seed else 0
            for operand in (0, 1):
                build, matrix = place(graph, context, linear, gemm, operand)
                gemm.node.update_arg(gemm.slot(operand), rotated(graph, context, build, matrix, rotation, site))
            changed = True
        return changed
