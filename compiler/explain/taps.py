"""Two passes that let a step's interpreter see every GEMM: what the model gave it, what it multiplied, what came out.

They add ``tap`` nodes and change nothing else: the rewritten graph's values are the compiler's, bit for bit.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.explain.step import tap
from fp4.compiler.graph import Builder, aten, is_transpose
from fp4.compiler.pipeline import Context, Pass
from fp4.runtime.spec import Quantizer, Rotation

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class TapGemms:
    """After ``assign_precision``: tap(linear's index, role, result, left, right, bias) after every GEMM.

    left, right: the model's own operands, contracted dimension last. Later passes put quantizers in front of the GEMM, and
    where they mask or rotate back its result, the tap reads what the model reads.
    """

    name: ClassVar[str] = "tap_gemms"

    def run(self, graph: Graph, context: Context) -> bool:
        for linear, role, gemm, _ in context.gemms():
            node = gemm.node
            if node.target is fp4.mm.default:
                left, right, bias = node.args[0], node.args[1], node.args[3]
            else:
                left, right = node.args[-2:]
                right = Builder(graph, node).transposed(right)  # type: ignore[arg-type]
                bias = node.args[0] if node.target is aten.addmm.default else None
            with graph.inserting_after(node):
                graph.call_function(tap, (linear.site.index, str(role), node, left, right, bias))
        return True


@dataclass(frozen=True)
class TapOperands:
    """After the last pass: to each tap, the role's two operands as they were quantized, or None for one that was not.

    An operand is a dict: value, what the GEMM multiplied; factors, the scales left to the GEMM's alpha; reference, the model's
    tensor through the same rotations and transposes, without quantizers or rounding; matrix, codes, scales, tensor_scale and
    quantizer of the quantization nearest the GEMM.
    """

    name: ClassVar[str] = "tap_operands"

    def run(self, graph: Graph, context: Context) -> bool:
        taps = {n.args[:2]: n for n in graph.find_nodes(op="call_function", target=tap)}
        for linear, role, gemm, precision in context.gemms():
            node = taps[linear.site.index, str(role)]
            operands: list[Any] = [None, None]
            if precision.quantized:
                build = Builder(graph, gemm.node, before=node)
                operands = [_operand(build, gemm.node.args[gemm.slot(i)]) for i in (0, 1)]
            node.args = (*node.args, gemm.first_is_left, operands)
        return True


def _operand(build: Builder, value: Any) -> dict[str, Any] | None:
    chain = _quantizes(value)
    if not chain:
        return None
    specs = [Quantizer.parse(str(q.args[2])) for q in chain]
    codes, scales, tensor_scale = (build.call(operator.getitem, chain[0], i) for i in range(3))
    factors = [build.call(operator.getitem, q, 2) for q, spec in zip(chain, specs, strict=True) if spec.has_tensor_scale]
    parts = {"matrix": chain[0].args[0], "codes": codes, "scales": scales, "tensor_scale": tensor_scale}
    return {**parts, "quantizer": str(specs[0]), "value": value, "factors": factors, "reference": _reference(build, value)}


def _quantizes(node: Any) -> list[Node]:
    """The quantize nodes that an operand went through, the nearest first: two where it is quantized from the forward copy."""
    found = []
    while True:
        if node.target is fp4.dequantize.default:
            node = node.args[0].args[0]
            found.append(node)
        elif not (is_transpose(node) or node.target is fp4.rotate.default):
            return found
        node = node.args[0]


def _reference(build: Builder, node: Any) -> Node:
    """The operand without its quantizers: the model's tensor, rotated in FP32 and transposed."""
    if node.target is fp4.dequantize.default:
        return _reference(build, node.args[0].args[0].args[0])
    if node.target is fp4.rotate.default:
        rotation = dataclasses.replace(Rotation.parse(str(node.args[1])), bf16=False)
        return build.call(fp4.rotate.default, _reference(build, node.args[0]), str(rotation), *node.args[2:])
    if is_transpose(node):
        return build.call(aten.permute.default, _reference(build, node.args[0]), [1, 0])
    return node


TAPS: dict[str, Pass] = {"assign_precision": TapGemms(), "share_quantized": TapOperands()}
