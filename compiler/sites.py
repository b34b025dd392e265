"""GEMM sites: which matrix products of a joint graph are the fprop, dgrad and wgrad of one linear op.

Forward and backward GEMMs of a linear share autograd's sequence number (``meta["seq_nr"]``); within such a bucket the
dataflow decides: dgrad reads the weight, wgrad reads the activation. Order decides nothing (a biased linear emits dgrad
first, an unbiased one wgrad first). What does not fit stays ``Role.UNKNOWN``: high precision, counted, reported.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch.fx import Graph, Node

from fp4.compiler import grouped
from fp4.compiler.graph import COPIES, VIEWS, descendants, is_transpose, root, source, tensor_of, untransposed
from fp4.compiler.policy import LinearSite
from fp4.compiler.shards import Shards, Where

aten = torch.ops.aten


class Role(StrEnum):
    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    UNKNOWN = "unknown"


ROLES = (Role.FPROP, Role.DGRAD, Role.WGRAD)
# The operands of each role, first and second, as GemmPrecision names them.
OPERANDS = {Role.FPROP: ("X", "W"), Role.DGRAD: ("dY", "W"), Role.WGRAD: ("dY", "X")}
# Rows and columns of those operands as the GEMM reads them, contracted dimension last.
DIMENSIONS = {Role.FPROP: ("mk", "nk"), Role.DGRAD: ("mn", "kn"), Role.WGRAD: ("nm", "km")}
# Ops that multiply by a weight and are no linear here: left in high precision, reported with what to write instead.
OTHERS: dict[Any, str] = {
    aten.bmm.default: "a batched product with weights: fp4 quantizes nn.Linear and grouped_mm; for transformers' experts write "
    "experts_implementation='grouped_mm'",
    aten.baddbmm.default: "a batched product with weights: fp4 quantizes nn.Linear and grouped_mm",
    aten.convolution.default: "a convolution is left alone; a 1x1 one is an nn.Linear over its channels: write that",
    aten.mv.default: "a matrix times a vector is left alone: there is one token",
    aten._scaled_grouped_mm.default: "a grouped product of operands quantized already",
}
DECOMPOSED = "Inductor turned the product into an outer product, or a sum: one of its sizes is 1"
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class GemmSite:
    """One matrix product: out = left @ right. `first_is_left`: is the role's first operand the left one?"""

    node: Node
    role: Role
    first_is_left: bool = True
    reason: str = ""  # why it is UNKNOWN

    def slot(self, operand: int) -> int:
        """Argument of the node's ``fp4::mm`` that holds the role's operand (0 first, 1 second)."""
        return operand if self.first_is_left else 1 - operand


@dataclass
class Linear:
    """A linear op: its public description and the GEMMs found for it. experts: how many, where it is a stack of them."""

    site: LinearSite
    x: Node  # the forward product's operands as the graph has them, transposes taken off
    w: Node
    gemms: dict[Role, GemmSite] = field(default_factory=dict)
    missing: dict[Role, str] = field(default_factory=dict)  # why a GEMM the model computes is no site
    experts: int = 0
    shards: dict[str, Shards] = field(default_factory=dict)  # of "m", "n" and "k", where ranks divide them

    def where(self, role: Role, operand: int) -> Where:
        """What this rank's operand of a GEMM is of the whole one."""
        dimensions = DIMENSIONS[role][operand]
        return Where(*(self.shards.get(d, ()) for d in dimensions))


@dataclass(frozen=True)
class Input:
    """What Dynamo knows of a graph input: its name in the model, whether it is a parameter, and, of a DTensor, the shards of
    each dimension and the groups of its mesh.

    is_trained: does the parameter get a gradient? prefix: the part of the name that leads to the module whose frame the graph
    is, behind a graph break.
    """

    name: str
    is_parameter: bool
    shards: tuple[Shards, ...] = ()
    groups: tuple[str, ...] = ()
    is_trained: bool = True
    prefix: str = ""


def is_batch_of_one(node: Node) -> bool:
    """Is the node a ``bmm`` of batch 1? An einsum with a weight is one; canonicalize makes it an ``mm``."""
    value = tensor_of(node)
    return node.target is aten.bmm.default and value is not None and isinstance(value.shape[0], int) and value.shape[0] == 1


def find_gemms(graph: Graph) -> list[Node]:
    """The matrix products that can be a linear's: ``mm``, ``addmm``, and the ``bmm`` that is one."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return [n for n in calls if n.target in (aten.mm.default, aten.addmm.default) or is_batch_of_one(n)]


def find_products(graph: Graph) -> list[Node]:
    """Everything that multiplies by a weight, or could: the linears' products, stacks of experts, and what is reported only."""
    gemms = set(find_gemms(graph))
    calls = (n for n in graph.nodes if n.op == "call_function")
    return [n for n in calls if n in gemms or grouped.is_product(n) or n.target in OTHERS or _is_decomposed(n)]


def find_linears(graph: Graph, inputs: dict[int, Input]) -> tuple[list[Linear], list[GemmSite]]:
    """The linears of a joint or inference graph in execution order, stacks of experts among them, and the products tied to
    none."""
    from_tangent = depends_on_tangents(graph)
    gemms = [n for n in find_gemms(graph) if "fp4" not in n.meta]
    backward: dict[Any, list[Node]] = defaultdict(list)
    for node in gemms:
        if node in from_tangent:
            backward[node.meta.get("seq_nr")].append(node)
    unknown: list[GemmSite] = []
    stacks: dict[Node, grouped.Call] = {}
    stacks_backward: list[grouped.Call] = []
    for call in grouped.calls(graph):
        if isinstance(call, tuple):
            unknown.append(GemmSite(call[0], Role.UNKNOWN, reason=call[1]))
        elif call.node in from_tangent:
            stacks_backward.append(call)
        else:
            stacks[call.node] = call

    found: list[tuple[Node, Node, bool]] = []  # fprop, weight root, is the weight the right operand?
    candidates = set(gemms) | set(stacks)
    for node in graph.nodes:
        if node not in candidates or node in from_tangent:
            continue
        weight = _stack(stacks[node], inputs) if node in stacks else _weight(node, inputs)
        if isinstance(weight, str):
            unknown.append(GemmSite(node, Role.UNKNOWN, reason=weight))
        else:
            found.append((node, *weight))

    linears = []
    for index, (node, _, weight_is_right) in enumerate(found):
        fprop = GemmSite(node, Role.FPROP, first_is_left=weight_is_right)
        if node in stacks:
            call = stacks[node]
            experts = tensor_of(call.right).shape[0]  # type: ignore[union-attr]
            site = _describe(node, (call.left, call.right), True, index, len(found), inputs)
            linears.append(Linear(site, call.left, call.right, {Role.FPROP: fprop}, experts=experts))
            continue
        left, right = node.args[-2:]
        x, w = (left, right) if weight_is_right else (right, left)
        site = _describe(node, (left, right), weight_is_right, index, len(found), inputs)
        linear = Linear(site, untransposed(x), untransposed(w), {Role.FPROP: fprop})
        linear.shards = _weight_shards(w, weight_is_right, inputs)
        linears.append(linear)
    plain = [(linear, weight) for linear, (_, weight, _) in zip(linears, found, strict=True) if not linear.experts]
    frozen = {weight for _, weight, _ in found if (known := _input(source(weight)[0], inputs)) and not known.is_trained}
    owners = _owners(graph) if from_tangent else {}
    of, weights = [linear for linear, _ in plain], [weight for _, weight in plain]
    unknown += _tie_backward(of, weights, frozen, owners, backward, from_tangent)
    unknown += _tie_stacks([linear for linear in linears if linear.experts], stacks, owners, stacks_backward, from_tangent)
    unknown += _others(graph, inputs)
    for linear in linears:
        linear.site = replace(linear.site, roles=tuple(str(r) for r in ROLES if r in linear.gemms))
    unknown += _note_decomposed(graph, linears, inputs, from_tangent)
    return linears, unknown


def _stack(call: grouped.Call, inputs: dict[int, Input]) -> tuple[Node, bool] | str:
    """As `_weight`, of a stack of experts."""
    value = tensor_of(call.node)
    if value is None or value.dtype not in SUPPORTED_DTYPES:
        return f"dtype {getattr(value, 'dtype', 'unknown')}: bfloat16, float16 and float32 are quantized"
    if call.weight_gradient or not _is_parameter(call.right, inputs):
        return "no operand is a parameter: a grouped product of activations"
    return root(call.right), True


def _tie_stacks(
    linears: list[Linear],
    stacks: dict[Node, grouped.Call],
    owners: dict[Node, Node],
    backward: list[grouped.Call],
    from_tangent: set[Node],
) -> list[GemmSite]:
    """Give each stack of experts its dgrad and wgrad; returns the backward products left over."""
    taken: set[Node] = set()
    for role in (Role.DGRAD, Role.WGRAD):
        for linear in linears:
            call = stacks[linear.gemms[Role.FPROP].node]
            fits = [c for c in backward if c.node not in taken and grouped.backward_role(c, call, from_tangent) == role]
            fits = [c for c in fits if grouped.seq_nr(c) == grouped.seq_nr(call)] or fits
            if role is Role.WGRAD:
                whole = source(call.right)[0]
                fits = [c for c in fits if owners.get(c.node, whole) is whole]
            if len(fits) > 1:  # stacks that read one activation: the dY they share with dgrad tells
                dgrad = linear.gemms.get(Role.DGRAD)
                of = next((grouped.gradient(c, from_tangent) for c in backward if dgrad and c.node is dgrad.node), None)
                fits = [c for c in fits if of is not None and root(grouped.gradient(c, from_tangent)) is root(of)]  # type: ignore[arg-type]
            if fits:
                linear.gemms[role] = GemmSite(fits[0].node, role)
                taken.add(fits[0].node)
    reason = "a backward product tied to no forward linear"
    return [GemmSite(c.node, Role.UNKNOWN, reason=reason) for c in backward if c.node not in taken]


def _others(graph: Graph, inputs: dict[int, Input]) -> list[GemmSite]:
    """Products of other ops with a weight: never quantized, and said so."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in OTHERS or "fp4" in node.meta or is_batch_of_one(node):
            continue
        operands = [a for a in node.args[:3] if isinstance(a, Node)]
        named = [
            f"{i.name}{part}" for a in operands for n, part in [_gathered(a)] if (i := _input(n, inputs)) and i.is_parameter
        ]
        if named:
            found.append(GemmSite(node, Role.UNKNOWN, reason=f"{OTHERS[node.target]} ({named[0]})"))
    return found


def _gathered(node: Node) -> tuple[Node, str]:
    """`source`, also through a gather of rows: experts picked a token."""
    node, part = source(node)
    while node.op == "call_function" and node.target in (aten.index.Tensor, aten.index_select.default, aten.gather.default):
        node, inner = source(node.args[0])  # type: ignore[arg-type]
        part = inner + part
    return node, part


def depends_on_tangents(graph: Graph) -> set[Node]:
    """The nodes of the backward: those that depend on a gradient given."""
    return descendants(n for n in graph.nodes if n.op == "placeholder" and _is_tangent(n))


def _owners(graph: Graph) -> dict[Node, Node]:
    """The nodes that are, but for views and casts, the whole gradient of an input, and that input. A joint graph returns the
    gradients last, one an input."""
    placeholders = [n for n in graph.find_nodes(op="placeholder") if not _is_tangent(n)]
    returned: Any = graph.output_node().args[0]
    if len(returned) < len(placeholders):
        return {}
    pairs = zip(returned[len(returned) - len(placeholders) :], placeholders, strict=True)
    return {root(gradient): p for gradient, p in pairs if isinstance(gradient, Node)}


def _is_tangent(node: Node) -> bool:
    desc = node.meta.get("desc")
    return type(desc).__name__.startswith("Tangent") if desc is not None else str(node.target).startswith("tangents")


def input_index(node: Node) -> int | None:
    """Position of a placeholder among Dynamo's inputs, looking through tensor subclasses (DTensor, FSDP)."""
    desc = node.meta.get("desc")
    while desc is not None and hasattr(desc, "base"):
        desc = desc.base
    if desc is not None:
        return getattr(desc, "idx", None)
    found = re.fullmatch(r"(?:primals_(\d+)|arg(\d+)_1)", str(node.target))
    if found is None:
        return None
    return int(found[1]) - 1 if found[1] else int(found[2])


def _input(node: Node, inputs: dict[int, Input]) -> Input | None:
    if node.op != "placeholder":
        return None
    index = input_index(node)
    return inputs.get(index) if index is not None else None


def _is_parameter(node: Node, inputs: dict[int, Input]) -> bool:
    """Is the node a parameter, or a part of one: an expert of a stack, q of a fused q, k, v?"""
    known = _input(source(node)[0], inputs)
    return known is not None and known.is_parameter


def _in_linear_module(node: Node) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    innermost = next(reversed(stack.values()))[1] if stack else None
    return innermost is torch.nn.Linear or str(innermost).endswith(".Linear")


def _weight(node: Node, inputs: dict[int, Input]) -> tuple[Node, bool] | str:
    """The root of a forward product's weight and whether it is the right operand; or why it has none."""
    value = tensor_of(node)
    if value is None or value.dtype not in SUPPORTED_DTYPES:
        return f"dtype {getattr(value, 'dtype', 'unknown')}: bfloat16, float16 and float32 are quantized"
    if any(node.kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
        return "addmm with alpha or beta other than 1"
    left, right = root(node.args[-2]), root(node.args[-1])  # type: ignore[arg-type]
    is_parameter = [_is_parameter(n, inputs) for n in (left, right)]
    if is_parameter[1] and not is_parameter[0]:
        return right, True
    if is_parameter[0] and not is_parameter[1]:
        return left, False
    if _in_linear_module(node) or all(is_parameter):
        return right, True
    return "no operand is a parameter: a product of two activations"


def _weight_shards(weight: Any, is_right: bool, inputs: dict[int, Input]) -> dict[str, Shards]:
    """The shards of N and K: of the parameter's dimensions, wherever views, casts and transposes put them."""
    swapped = is_right  # the right operand of a product is (K, N)
    while weight.op == "call_function" and (weight.target in VIEWS or weight.target in COPIES):
        swapped ^= is_transpose(weight)
        weight = weight.args[0]
    known = _input(weight, inputs)
    if known is None or len(known.shards) != 2:
        return {}
    n, k = reversed(known.shards) if swapped else known.shards
    return {name: shards for name, shards in (("n", n), ("k", k)) if shards}


def _tie_backward(
    linears: list[Linear],
    weights: list[Node],
    frozen: set[Node],
    owners: dict[Node, Node],
    backward: dict[Any, list[Node]],
    from_tangent: set[Node],
) -> list[GemmSite]:
    """Give each linear its dgrad, then its wgrad; returns the backward products left over."""
    taken: set[Node] = set()
    for role in (Role.DGRAD, Role.WGRAD):
        for linear, weight in zip(linears, weights, strict=True):
            bucket = backward.get(linear.gemms[Role.FPROP].node.meta.get("seq_nr"), ())
            sites = [s for n in bucket if n not in taken and (s := _backward_site(n, weight, root(linear.x), from_tangent))]
            sites = [s for s in sites if s.role is role and _has_shape(s, linear)]
            if role is Role.WGRAD:  # one that reads the same activation may be another linear's
                whole = source(weight)[0]
                sites = [] if weight in frozen else [s for s in sites if owners.get(s.node, whole) is whole]
            if len(sites) > 1:  # no seq_nr tells them apart: q, k and v read one activation. The dY they share with dgrad does
                dgrad = linear.gemms.get(Role.DGRAD)
                sites = [s for s in sites if dgrad is not None and _gradient(s) is _gradient(dgrad)][:1]
            if sites:
                linear.gemms[role] = sites[0]
                taken.add(sites[0].node)
    left_over = [n for bucket in backward.values() for n in bucket if n not in taken]
    return [GemmSite(n, Role.UNKNOWN, reason="a backward product tied to no forward linear") for n in left_over]


def _has_shape(gemm: GemmSite, linear: Linear) -> bool:
    """Is the product of dX's or dW's size? Where seq_nr is unknown, linears that read one activation are told apart by it."""
    value, of = tensor_of(gemm.node), tensor_of(linear.w if gemm.role is Role.WGRAD else linear.x)
    assert value is not None
    assert of is not None
    return sorted(map(str, value.shape)) == sorted(map(str, of.shape))


def _gradient(gemm: GemmSite) -> Node:
    return root(gemm.node.args[-2] if gemm.first_is_left else gemm.node.args[-1])  # type: ignore[arg-type]


def _backward_site(node: Node, weight: Node, activation: Node, from_tangent: set[Node]) -> GemmSite | None:
    """dgrad or wgrad of the linear with these roots, or None when the dataflow fits neither, or both."""
    left, right = node.args[-2:]
    grad_is_left = left in from_tangent
    if grad_is_left == (right in from_tangent):
        return None
    other = root(right if grad_is_left else left)  # type: ignore[arg-type]
    if (other is weight) == (other is activation):
        return None
    # dY is the first operand of either.
    return GemmSite(node, Role.DGRAD if other is weight else Role.WGRAD, first_is_left=grad_is_left)


def _static(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _describe(
    node: Node, operands: tuple[Any, Any], weight_is_right: bool, index: int, count: int, inputs: dict[int, Input]
) -> LinearSite:
    left, right = map(tensor_of, operands)
    assert left is not None
    assert right is not None
    (m, k), n = left.shape, right.shape[-1]
    if not weight_is_right:
        m, n = n, m
    weight, part = source(operands[weight_is_right])
    known = _input(weight, inputs)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][1] if stack else None
    name = known.name.removesuffix(".weight") + part if known else f"<computed weight {index}>"
    if known and _in_linear_module(node):
        # A tied weight has the name it was first met by, the embedding's: a rule on the head means the head.
        path = re.sub(r"^.*\]\.?", "", stack[-1][0])  # after Dynamo's name of the model: L['self'].
        name = known.prefix + path if path and path.rpartition(".")[2] != name.rpartition(".")[2] else name
    module_name = getattr(module, "__name__", None) or (str(module).rpartition(".")[2] if module else "")
    return LinearSite(
        name=name,
        index=index,
        count=count,
        m=_static(m),
        n=_static(n),
        k=_static(k),
        dtype=str(left.dtype).removeprefix("torch."),
        module_type=module_name,
        roles=(),
    )


def _is_decomposed(node: Node) -> bool:
    """Is the node a product with a size of 1 that Inductor wrote as multiply and sum before the passes ran?"""
    if node.op != "call_function" or node.target not in (aten.mul.Tensor, aten.sum.dim_IntList) or "fp4" in node.meta:
        return False
    original = str(node.meta.get("original_aten"))  # by name: AOTAutograd leaves a copy of the op there
    # Of a multiply that a sum follows, the sum is the result.
    partial = node.target is aten.mul.Tensor and any(u.target is aten.sum.dim_IntList for u in node.users)
    return original in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default") and not partial


def _note_decomposed(graph: Graph, linears: list[Linear], inputs: dict[int, Input], from_tangent: set[Node]) -> list[GemmSite]:
    """Say of products that became multiply and sum that they are not quantized; returns those of no linear found."""
    by_seq = {linear.gemms[Role.FPROP].node.meta.get("seq_nr"): linear for linear in linears}
    found = []
    for node in filter(_is_decomposed, graph.nodes):
        linear = by_seq.get(node.meta.get("seq_nr"))
        if node not in from_tangent:
            made: Any = node.args[0] if node.target is aten.sum.dim_IntList else node
            sources = [source(a)[0] for a in made.all_input_nodes]
            names = [known.name for n in sources if (known := _input(n, inputs)) and known.is_parameter]
            if names:
                reason = f"{DECOMPOSED} ({names[0].removesuffix('.weight')})"
                found.append(GemmSite(node, Role.UNKNOWN, reason=reason))
        elif linear is not None:
            for role, of in ((Role.DGRAD, linear.x), (Role.WGRAD, linear.w)):
                absent = role not in linear.gemms and role not in linear.missing
                if absent and _as_many(node, of):
                    one = "one token: " if linear.site.m == 1 else ""
                    linear.missing[role] = one + DECOMPOSED
                    break
    return found


def _as_many(node: Node, other: Node) -> bool:
    """Have both as many elements? Sizes of 1, and of a batch that one of them has flattened, do not count."""
    a, b = tensor_of(node), tensor_of(other)
    assert a is not None
    assert b is not None
    return str(a.numel()) == str(b.numel())
