"""On a GPU with FP8 tensor cores and no FP4 ones (Ada, Hopper): a GEMM of two MXFP4 operands is multiplied in FP8.

``dequantize x2 -> fp4::mm`` becomes ``fp4::fp8_operand x2 -> fp4::fp8_mm``: E2M1 times a power of two is exact in FP8 within a
reach (runtime/fp8.py), so the operands are those of the BF16 product, at twice its speed. Each is moved to the top of its
format's reach by a power of two that the device finds among its block scales. What lies below the reach is rounded and
counted; the report shows the counts. Option `exact` leaves the products in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, fp4_nodes
from fp4.passes.codes import Codes, codes_of
from fp4.runtime import fp8
from fp4.runtime.spec import Quantizer

fp4 = torch.ops.fp4
FP8_ONLY = (89, 90)  # capability times ten


@dataclass(frozen=True)
class LowerFp8:
    """target: GPU architecture, whatever the device of the graph; None: that of the device."""

    name: ClassVar[str] = "lower_fp8"
    target: str | None = None

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in list(fp4_nodes(graph, "mm")):
            if has_fp8(node.meta["val"].device, self.target):
                changed |= _lower(graph, node)
        if changed:
            graph.eliminate_dead_code()
        return changed


def has_fp8(device: torch.device, name: str | None) -> bool:
    """Has the named target, or the device, FP8 tensor cores and no block-scaled ones (sm_89, sm_90)?"""
    if name is None and device.type != "cuda":
        return False
    from fp4.kernels.target import Target, TargetError, target_of

    try:
        target = Target(name) if name is not None else target_of(device)
    except TargetError:
        return False
    return target.capability in FP8_ONLY


def formats(first: Quantizer | None, second: Quantizer | None) -> tuple[str, ...]:
    """The FP8 formats of a GEMM's operands, "e5m2", "e4m3"; none where an operand would not be exact."""
    return () if fp8.inexact(first, second) else tuple(str(d).rpartition("float8_")[2].removesuffix("fn") for d in fp8.FORMATS)


def counter(gemm: str, operand: int) -> str:
    """The name under which an operand's elements outside the reach are counted. gemm: "linear's name role"."""
    return f"{gemm} {operand}"


def _register() -> None:
    import fp4.kernels.fp8_ops  # noqa: F401  registers the ops


def _lower(graph: Graph, node: Node) -> bool:
    first, second, alpha, bias, dtype = node.args
    operands = codes_of(first), codes_of(second)
    if None in operands or fp8.inexact(*(o.quantizer for o in operands if o is not None)):
        return False
    _register()
    build = Builder(graph, node)
    made = [_operand(build, node, i, o) for i, o in enumerate(operands) if o is not None]
    (a, a_factor), (b, b_factor) = made
    product = build.call(fp4.fp8_mm.default, a, b, a_factor, b_factor, alpha, bias, dtype)
    product.meta = {**node.meta, "val": product.meta["val"]}
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    return True


def _operand(build: Builder, gemm: Node, number: int, operand: Codes) -> tuple[Node, ...]:
    codes, scales = operand.contiguous(build)
    top = build.call(fp4.top_scale.default, scales)
    name = counter(gemm.meta.get("fp4", "?"), number)
    call = build.call(fp4.fp8_operand.default, codes, scales, top, str(operand.quantizer), fp8.FORMATS[number], name)
    return build.outputs(call)
