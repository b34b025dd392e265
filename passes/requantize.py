"""GEMMs of the backward that read what fprop multiplied, decoded: ``dequantize -> transpose -> rotate -> quantize -> fp4::mm``.

The gradient is then that of the function computed. Where fprop's operands are rotated, so is the copy, and dX or dW comes
out in that space: it is masked there where the quantizer clipped, and rotated back. X's codes are saved by forward; W is
quantized again from the parameter, unless the context says to save its codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, is_transpose, untransposed
from fp4.compiler.operands import (
    Quantized,
    operand_site,
    quantized,
    recompute_casts,
    rotated,
    set_alpha,
    signs_site,
)
from fp4.compiler.pipeline import Context
from fp4.compiler.policy import GemmPrecision
from fp4.compiler.sites import GemmSite, Linear, Role
from fp4.runtime.spec import Quantizer, Rotation

fp4 = torch.ops.fp4
X, W = 0, 1  # fprop's operands


@dataclass(frozen=True)
class Requantize:
    name: ClassVar[str] = "requantize"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for linear, role, gemm, precision in context.gemms():
            if role not in (Role.DGRAD, Role.WGRAD):
                continue
            # Not every graph tags the products themselves (Inductor's mode "lite" does not); nodes that read forward's need it.
            gemm.node.meta.setdefault("partitioner_tag", "is_backward")
            if precision.second.source == "forward":
                _operands(graph, context, linear, gemm, precision)
                changed = True
            changed |= _straight_through(graph, context, linear, gemm, precision)
        return changed


def _operands(graph: Graph, context: Context, linear: Linear, gemm: GemmSite, precision: GemmPrecision) -> None:
    build = Builder(graph, gemm.node)
    copy = _forward_copy(graph, context, linear, gemm, W if gemm.role is Role.DGRAD else X)
    gradient: Any = gemm.node.args[gemm.slot(0)]
    matrices: list[Node] = [gradient, build.transposed(copy.decoded(build))]
    factors: list[Node] = []
    for operand, spec in enumerate((precision.first, precision.second)):
        matrix = matrices[operand]
        if precision.rotation is not None:
            site = signs_site(linear, gemm.role) if precision.rotation.needs_seed else 0
            matrix = rotated(graph, context, build, matrix, precision.rotation, site)
        if spec.quantizer is not None:
            site = operand_site(linear, gemm.role, operand) if spec.quantizer.needs_seed else 0
            parts = quantized(graph, context, build, matrix, spec.quantizer, site, linear.where(gemm.role, operand))
            matrix = parts.decoded(build)
            factors += parts.factor
        gemm.node.update_arg(gemm.slot(operand), matrix)
    set_alpha(graph, gemm, factors + copy.factor)


def _forward_copy(graph: Graph, context: Context, linear: Linear, gemm: GemmSite, operand: int) -> Quantized:
    """Fprop's quantized X or W, as a backward GEMM reads it."""
    fprop = linear.gemms[Role.FPROP]
    decode: Any = fprop.node.args[fprop.slot(operand)]
    quantize: Any = decode.args[0].args[0]
    matrix, _, spec, seed, site = quantize.args
    quantizer = Quantizer.parse(spec)
    if operand == X or context.save_weights:
        tensor_scale = Builder(graph, quantize, before=decode).outputs(quantize)[2]
        return Quantized(quantizer, matrix, decode.args[4], decode.args[0], decode.args[1], tensor_scale)
    # The backward's own copy of the weight. Where it draws, it draws as forward did; else another site keeps CSE from
    # merging it with forward's, which would save it.
    build = Builder(graph, gemm.node, partitioner_tag="must_be_in_backward")
    own = operand_site(linear, Role.DGRAD, 1)
    if matrix.target is fp4.rotate.default:
        source, rotation, sign_seed, sign_site = matrix.args
        matrix = build.call(fp4.rotate.default, _again(build, source), rotation, sign_seed, sign_site if sign_seed else own)
    else:
        matrix = _again(build, matrix)
    return quantized(graph, context, build, matrix, quantizer, site if seed else own, linear.where(Role.FPROP, operand))


def _again(build: Builder, weight: Node) -> Node:
    """The weight as fprop reads it, made again from the parameter."""
    base = untransposed(weight)
    recompute_casts(base)
    return build.transposed(base) if is_transpose(weight) else base


def _straight_through(graph: Graph, context: Context, linear: Linear, gemm: GemmSite, precision: GemmPrecision) -> bool:
    """Take dX or dW through fprop's clip mask and back through its rotation."""
    decision = context.decisions[linear.site.index].precision.fprop
    operand = X if gemm.role is Role.DGRAD else W
    rotation = decision.rotation if precision.second.source == "forward" else None
    clip = (decision.first, decision.second)[operand].clip_gradient
    if rotation is None and not clip:
        return False
    node = gemm.node
    users = list(node.users)
    mask = _mask(graph, context, linear, gemm, operand) if clip else None
    _update_shape(node)
    build = Builder(graph, node, before=node.next)
    gradient = node if gemm.first_is_left else build.transposed(node)
    if mask is not None:
        gradient = build.call(fp4.apply_mask.default, gradient, mask)
    if rotation is not None:
        gradient = _unrotate(graph, context, linear, build, gradient, rotation, operand)
    gradient = gradient if gemm.first_is_left else build.transposed(gradient)
    for user in users:
        user.replace_input_with(node, gradient)
    return True


def _mask(graph: Graph, context: Context, linear: Linear, gemm: GemmSite, operand: int) -> Node:
    """The packed mask of what fprop's quantizer did not clip; X's is made, and saved, in forward."""
    copy = _forward_copy(graph, context, linear, gemm, operand)
    made: Any = copy.codes.args[0]
    in_forward = operand == X or context.save_weights
    fprop = linear.gemms[Role.FPROP].node
    build = Builder(graph, made, before=fprop if in_forward else gemm.node)
    return build.call(fp4.clip_mask.default, copy.matrix, copy.scales, str(copy.quantizer))


def _unrotate(
    graph: Graph, context: Context, linear: Linear, build: Builder, gradient: Node, rotation: Rotation, operand: int
) -> Node:
    fprop = linear.gemms[Role.FPROP]
    decode: Any = fprop.node.args[fprop.slot(operand)]
    unrotated = decode.args[0].args[0].args[0].args[0]  # dequantize <- codes <- quantize <- rotate <- the model's tensor
    seed = context.seed(graph) if rotation.needs_seed else None
    site = signs_site(linear, Role.FPROP) if rotation.needs_seed else 0
    columns = build.size(unrotated, 1)
    dtype = gradient.meta["val"].dtype
    return build.call(fp4.unrotate.default, gradient, str(rotation), seed, site, columns, dtype)


def _update_shape(node: Node) -> None:
    """The product is wider than the model's where fprop's rotation padded the contracted dimension."""
    values = [a.meta["val"] if isinstance(a, Node) else a for a in node.args]
    with node.meta["val"].fake_mode:
        node.meta["val"] = fp4.mm.default(*values)
