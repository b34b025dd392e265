"""Where the nodes that prepare a GEMM's operand go, and which random draws they use."""

from __future__ import annotations

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4.compiler.graph import COPIES, VIEWS, Builder, is_transpose, root, untransposed
from fp4.compiler.pipeline import Context
from fp4.compiler.sites import OPERANDS, ROLES, GemmSite, Linear, Role

SITES_PER_LINEAR = 16


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
        _recompute_casts(matrix)
    elif matrix is (linear.x if letter == "X" else linear.w):
        build = Builder(graph, fprop)
    else:  # backward reads another view than forward did
        return Builder(graph, gemm.node), node
    return build, build.transposed(matrix) if is_transpose(node) else node


def _recompute_casts(weight: Node) -> None:
    """Cast the parameter again in backward too: else what is saved is autocast's BF16 copy of it."""
    if root(weight).op != "placeholder":
        return
    while weight.target in VIEWS or weight.target in COPIES:
        weight.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
        weight = weight.args[0]  # type: ignore[assignment]
