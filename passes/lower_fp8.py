"""On a GPU with FP8 tensor cores and no FP4 ones (Ada, Hopper): a GEMM of two MXFP4, or two FP8, operands is multiplied in FP8.

``dequantize x2 -> fp4::mm`` becomes ``fp4::fp8_operand x2 -> fp4::fp8_mm``: E2M1 times a power of two is exact in FP8 within a
reach (runtime/fp8.py), so the operands are those of the BF16 product, at twice its speed. Each is moved to the top of its
format's reach by a power of two that the device finds among its block scales. What lies below the reach is rounded and
counted; the report shows the counts.

On Hopper ``dequantize x2 -> fp4::mm`` of E4M3 operands with FP32 scales of 1x128 or 128x128 becomes ``fp4::fp8_block_mm`` on
the codes themselves. Nothing is rounded; partial sums are those of FP8 tensor cores. Option `exact` leaves all as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, fp4_nodes
from fp4.passes.codes import Codes, codes_of, contracted
from fp4.runtime import fp8
from fp4.runtime.spec import Quantizer

fp4 = torch.ops.fp4
FP8_ONLY = (89, 90)  # capability times ten
HOPPER = 90


@dataclass(frozen=True)
class LowerFp8:
    """target: GPU architecture, whatever the device of the graph; None: that of the device."""

    name: ClassVar[str] = "lower_fp8"
    target: str | None = None

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in list(fp4_nodes(graph, "mm")):
            device = node.meta["val"].device
            if has_fp8(device, self.target):
                changed |= _lower(graph, node) or (has_blocks(device, self.target) and _lower_blocks(graph, node))
        if changed:
            graph.eliminate_dead_code()
        return changed


def has_fp8(device: torch.device, name: str | None) -> bool:
    """Has the named target, or the device, FP8 tensor cores and no block-scaled ones (sm_89, sm_90)?"""
    return _capability(device, name) in FP8_ONLY


def has_blocks(device: torch.device, name: str | None) -> bool:
    """Does cuBLAS multiply FP8 with FP32 block scales on the named target, or on the device with this torch?"""
    from fp4.kernels.fp8_blocks import new_enough

    return _capability(device, name) == HOPPER and (name is not None or new_enough())


def _capability(device: torch.device, name: str | None) -> int | None:
    if name is None and device.type != "cuda":
        return None
    from fp4.kernels.target import Target, TargetError, target_of

    try:
        return (Target(name) if name is not None else target_of(device)).capability
    except TargetError:
        return None


def formats(first: Quantizer | None, second: Quantizer | None, blocks: bool = False) -> tuple[str, ...]:
    """The FP8 formats in which a GEMM's operands are multiplied, "e5m2", "e4m3"; none where they are not.

    blocks: with FP32 block scales too.
    """
    from fp4.kernels.fp8_blocks import no_product

    if not fp8.inexact(first, second):
        return tuple(str(d).rpartition("float8_")[2].removesuffix("fn") for d in fp8.FORMATS)
    return ("e4m3", "e4m3") if blocks and not no_product(first, second) else ()


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
    _replace(graph, node, build.call(fp4.fp8_mm.default, a, b, a_factor, b_factor, alpha, bias, dtype))
    return True


def _lower_blocks(graph: Graph, node: Node) -> bool:
    from fp4.kernels.fp8_blocks import no_product

    first, second, _, bias, dtype = node.args  # no alpha: FP8 has no tensor scale
    a, b = codes_of(first), codes_of(second)
    if a is None or b is None or no_product(a.quantizer, b.quantizer):
        return False
    _register()
    build = Builder(graph, node)
    k = contracted(build, a, b, first)  # type: ignore[arg-type]
    codes = *a.contiguous(build), *b.contiguous(build)
    specs = str(a.quantizer), str(b.quantizer)
    _replace(graph, node, build.call(fp4.fp8_block_mm.default, *codes, *specs, k, bias, dtype))
    return True


def _replace(graph: Graph, node: Node, product: Node) -> None:
    product.meta = {**node.meta, "val": product.meta["val"]}
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _operand(build: Builder, gemm: Node, number: int, operand: Codes) -> tuple[Node, ...]:
    codes, scales = operand.contiguous(build)
    top = build.call(fp4.top_scale.default, scales)
    name = counter(gemm.meta.get("fp4", "?"), number)
    call = build.call(fp4.fp8_operand.default, codes, scales, top, str(operand.quantizer), fp8.FORMATS[number], name)
    return build.outputs(call)
