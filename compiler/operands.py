"""The nodes that prepare a GEMM's operand: where they go, which random draws they use, and how they are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4.compiler.graph import COPIES, VIEWS, Builder, is_transpose, root, untransposed
from fp4.compiler.pipeline import Context
from fp4.compiler.shards import Where, position
from fp4.compiler.sites import OPERANDS, ROLES, GemmSite, Linear, Role
from fp4.runtime.spec import Quantizer, Rotation

fp4 = torch.ops.fp4
ALPHA = 2  # argument of fp4::mm

SITES_PER_LINEAR = 16
APART = 1 << 30  # elements between two rows whose place in the whole operand is not known


def operand_site(linear: Linear, role: Role, operand: int) -> int:
    """The draw site of an operand's rounding: unique in the graph, so no two draws are alike and CSE merges none."""
    return SITES_PER_LINEAR * linear.site.index + 2 * ROLES.index(role) + operand


def signs_site(linear: Linear, role: Role) -> int:
    """The draw site of a rotation's signs: one a GEMM, shared by its two operands."""
    return SITES_PER_LINEAR * linear.site.index + 8 + ROLES.index(role)


def place(graph: Graph, context: Context, linear: Linear, gemm: GemmSite, operand: int) -> tuple[Builder, Node]:
    """A builder for the nodes that prepare an operand of a GEMM, and the operand, contracted dimension last.

    dY is prepared at its GEMM. X is prepared in forward for wgrad too, so that what forward saves are its codes. W is
    prepared for dgrad in backward, from the parameter, unless the context says to save its codes: the parameter is alive
    anyway, and a second copy of every weight between forward and backward is memory nobody asked for.
    """
    node: Node = gemm.node.args[gemm.slot(operand)]  # type: ignore[assignment]
    letter = OPERANDS[gemm.role][operand]
    if gemm.role is Role.FPROP or letter == "dY":
        return Builder(graph, gemm.node), node
    fprop = linear.gemms[Role.FPROP].node
    matrix = untransposed(node)
    if letter == "W" and not context.save_weights and "partitioner_tag" in gemm.node.meta:
        build = Builder(graph, gemm.node, partitioner_tag="must_be_in_backward")
        recompute_casts(matrix)
    elif matrix is (linear.x if letter == "X" else linear.w):
        build = Builder(graph, fprop)
    else:  # backward reads another view than forward did
        return Builder(graph, gemm.node), node
    return build, build.transposed(matrix) if is_transpose(node) else node


def recompute_casts(weight: Node) -> None:
    """Cast the parameter again in backward too: else what is saved is autocast's BF16 copy of it."""
    if root(weight).op != "placeholder":
        return
    while weight.target in VIEWS or weight.target in COPIES:
        weight.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
        weight = weight.args[0]  # type: ignore[assignment]


@dataclass(frozen=True)
class Quantized:
    """A quantized operand: the matrix quantized, its columns, and the nodes of codes, block scales, tensor or outer scale."""

    quantizer: Quantizer
    matrix: Node
    columns: Node | int
    codes: Node
    scales: Node
    tensor_scale: Node

    @property
    def factor(self) -> list[Node]:
        """The tensor scale where there is one: a factor of the GEMM's alpha."""
        return [self.tensor_scale] if self.quantizer.has_tensor_scale else []

    def decoded(self, build: Builder) -> Node:
        """Code times block scale: BF16 where that is exact, else FP32. Outer scales are in it, the tensor scale is not."""
        dtype = torch.bfloat16 if self.quantizer.exact_in_bf16 else torch.float32
        outer = self.tensor_scale if self.quantizer.outer else None
        return build.call(fp4.dequantize.default, self.codes, self.scales, outer, str(self.quantizer), self.columns, dtype)


def rotated(graph: Graph, context: Context, build: Builder, matrix: Node, rotation: Rotation, site: int) -> Node:
    """The matrix rotated along its last dimension. site: of the signs, where they are drawn."""
    seed = context.seed(graph) if rotation.needs_seed else None
    return build.call(fp4.rotate.default, matrix, str(rotation), seed, site)


def quantized(
    graph: Graph, context: Context, build: Builder, matrix: Node, quantizer: Quantizer, site: int, where: Where
) -> Quantized:
    """The matrix quantized along its last dimension. where: what it is of the whole operand, whose amax and draws it gets."""
    amax = whole_amax(build, matrix, where.groups) if quantizer.needs_amax else None
    seed = _located(graph, context, build, matrix, quantizer, where) if quantizer.needs_seed else None
    columns = build.size(matrix, 1)
    node = build.call(fp4.quantize.default, matrix, amax, str(quantizer), seed, site)
    return Quantized(quantizer, matrix, columns, *build.outputs(node))


def whole_amax(build: Builder, matrix: Node, groups: tuple[str, ...]) -> Node:
    """The amax of the operand of which the ranks of `groups` hold parts.

    It is saved, never recomputed: a rank that recomputed it alone would wait for the others forever.
    """
    amax = build.call(fp4.amax.default, matrix)
    if not groups:
        return amax
    whole = build.call(fp4.reduce_amax.default, amax, list(groups))
    if whole.meta.get("partitioner_tag") == "is_forward":
        whole.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return whole


def _located(graph: Graph, context: Context, build: Builder, matrix: Node, quantizer: Quantizer, where: Where) -> Node:
    """The seed, with the place in the whole operand of the part this rank holds: so elements draw as on one device.

    Where the place is not known, or not a multiple of what one random word counter serves, parts only draw differently.
    """
    seed = context.seed(graph)
    if not where.groups:
        return seed
    (row, _), (column, columns) = position(where.rows), position(where.columns)
    width = matrix.meta["val"].shape[1]
    unit = 4 * quantizer.block[1] if quantizer.rounding == "ms_eden" else 8  # columns of one counter of random words
    even = all(s.even for s in (*where.rows, *where.columns))
    if not (even and isinstance(width, int) and width % unit == 0):
        part = row * columns + column
        return build.call(fp4.locate.default, seed, 0, 0, APART, part << 48)
    return build.call(fp4.locate.default, seed, build.size(matrix, 0), row, width * columns, width * column)


def set_alpha(graph: Graph, gemm: GemmSite, factors: list[Node]) -> None:
    """Make the product of the tensor scales the GEMM's alpha: factors of its FP32 accumulator."""
    build = Builder(graph, gemm.node)
    alpha: Node | None = None
    for factor in factors:
        alpha = factor if alpha is None else build.call(torch.ops.aten.mul.Tensor, alpha, factor)
    if alpha is not None:
        gemm.node.update_arg(ALPHA, alpha)
