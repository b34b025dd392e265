"""Ask the policy for each linear's precision and mark every GEMM with the decision.

A GEMM to be quantized becomes ``fp4::mm(a, b, alpha, bias, dtype)``, both operands with the contracted dimension last, the
form block scales need; FP32 accumulation and one rounding, as ``mm`` has it. A stack of experts becomes ``fp4::grouped_mm``,
one op a GEMM with its precision in it. A GEMM left alone stays what it is.

A wgrad with output "fp32" has an FP32 result where nothing but views and a cast to FP32 follow it; the cast goes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler import grouped
from fp4.compiler.graph import VIEWS, Builder, aten, prims
from fp4.compiler.pipeline import Context
from fp4.compiler.policy import LinearPrecision
from fp4.compiler.sites import GemmSite, Linear, Role, depends_on_tangents
from fp4.runtime.grouped import SITES, GroupedPrecision
from fp4.runtime.spec import Quantizer, Rotation


@dataclass(frozen=True)
class AssignPrecision:
    name: ClassVar[str] = "assign_precision"

    def run(self, graph: Graph, context: Context) -> bool:
        context.decisions, warnings = context.policy.assign([linear.site for linear in context.linears])
        context.warnings += warnings
        replaced: dict[Node, Node] = {}
        from_tangent = depends_on_tangents(graph) if any(linear.experts for linear in context.linears) else set()
        for linear, decision in zip(context.linears, context.decisions, strict=True):
            precisions = decision.precision.gemms()
            for role, gemm in linear.gemms.items():
                if linear.experts:
                    _to_grouped(graph, context, linear, role, decision.precision, from_tangent, replaced)
                elif precisions[role].quantized:
                    old = gemm.node
                    if precisions[role].output and (reason := _to_fp32(old)):
                        context.warnings.append(f"{linear.site.name} {role}: output='fp32' is not done, {reason}")
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


def _to_fp32(product: Node) -> str:
    """Make a product's result FP32 up to the cast to FP32 that follows, and remove that; returns why not, empty where done."""
    if product.meta["val"].dtype == torch.float32:
        return ""
    own = str(product.meta["val"].dtype).removeprefix("torch.")
    chain = [product]
    while len(users := list(chain[-1].users)) == 1 and users[0].target in VIEWS:
        chain += users
    if len(users) != 1:
        return f"dW is read {len(users)} times, in {own}"
    (cast,) = users
    if cast.op == "output":
        return f"the parameter is {own} in this graph, and so is its gradient"
    if cast.target is not prims.convert_element_type.default or cast.args[1] != torch.float32:
        return f"{cast.target} reads dW in {own}"
    for node in chain:
        node.meta["val"] = node.meta["val"].float()
        node.meta.pop("tensor_meta", None)  # the MLIR printer would read the old dtype there
    cast.replace_all_uses_with(chain[-1])
    cast.graph.erase_node(cast)
    return ""


def _to_grouped(
    graph: Graph,
    context: Context,
    linear: Linear,
    role: Role,
    precision: LinearPrecision,
    from_tangent: set[Node],
    replaced: dict[Node, Node],
) -> None:
    """replaced: the nodes rewritten so far, and this one."""
    text = _grouped_precision(precision, role)
    if not (text.first or text.second or text.copy or text.clip):
        return
    gemm = linear.gemms[role]
    node = gemm.node
    if precision.gemms()[role].output:
        context.warnings.append(f"{linear.site.name} {role}: output='fp32' is not done, stacks of experts have no such product")
    if linear.shards and role is Role.FPROP:
        context.warnings.append(f"{linear.site.name}: ranks hold parts of these experts' operands, and each scales by its own")
    call = next(c for c in grouped.calls(graph) if isinstance(c, grouped.Call) and c.node is node)
    # The fallback's two gradients are parts of one call: nodes that serve one take the metadata of the call.
    build = Builder(graph, node.args[0] if node.target is operator.getitem else node, before=node)  # type: ignore[arg-type]
    first, second, is_swapped = grouped.operands(build, role, call, from_tangent)
    clipped: Node | None = None
    if text.clip:
        x = replaced.get(linear.x, linear.x)
        clipped = x if role is Role.DGRAD else grouped.swapped(build, linear.w)
    seed = context.seed(graph) if _draws(text) else None
    # After the draws of the linears, 16 for every expert of the stacks before this one.
    index = len(context.linears) + sum(before.experts for before in context.linears[: linear.site.index])
    dtype = node.meta["val"].dtype
    product = build.call(
        torch.ops.fp4.grouped_mm.default, first, second, call.offs, clipped, str(text), seed, SITES * index, dtype
    )
    result = build.call(aten.transpose.int, product, -2, -1) if is_swapped else product
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    gemm.node = product
    replaced[node] = result


def _grouped_precision(precision: LinearPrecision, role: Role) -> GroupedPrecision:
    gemm, fprop = precision.gemms()[role], precision.fprop
    copy, forward_rotation, clip = "", "", ""
    if role is not Role.FPROP:
        of, own = (fprop.second, fprop.first) if role is Role.DGRAD else (fprop.first, fprop.second)
        copy = _text(of.quantizer) if gemm.second.source == "forward" else ""
        clip = _text(own.quantizer) if own.clip_gradient else ""
        forward_rotation = _text(fprop.rotation) if copy or clip else ""
    first, second = _text(gemm.first.quantizer), _text(gemm.second.quantizer)
    return GroupedPrecision(str(role), first, second, _text(gemm.rotation), copy, forward_rotation, clip)


def _text(spec: Quantizer | Rotation | None) -> str:
    return str(spec) if spec is not None else ""


def _draws(text: GroupedPrecision) -> bool:
    quantizers = (text.first, text.second, text.copy, text.clip)
    return any(Quantizer.parse(q).needs_seed for q in quantizers if q) or any(
        Rotation.parse(r).needs_seed for r in (text.rotation, text.forward_rotation) if r
    )
