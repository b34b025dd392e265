"""What forward keeps for backward: each saved tensor, its format and bytes, and the GEMMs that read it."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fp4.compiler.explain.capture import Captured
from fp4.compiler.explain.fx import SHORT, path_of, target_of
from fp4.compiler.graph import COPIES, VIEWS, aten
from fp4.compiler.sites import OPERANDS, ROLES, input_index

fp4 = torch.ops.fp4
PREPARATION = frozenset({operator.getitem, *VIEWS, *COPIES})
TAKES_BIAS_FIRST = (aten.mm.default, aten.addmm.default)
GROUPED = fp4.grouped_mm.default
PRODUCTS = (*TAKES_BIAS_FIRST, fp4.mm.default, GROUPED, aten._grouped_mm.default)
PARTS = {0: "codes", 1: "scales", 2: "tensor scale"}


@dataclass
class Saved:
    """A tensor that forward hands to backward.

    kind: "saved"; or "parameter", "input", "output" where the tensor is alive anyway. format: a quantizer's name, or a dtype.
    part: codes, scales, tensor scale, amax, clip mask, seed, or the op that made it. readers: (linear, role, operand).
    bytes: what it occupies; a view of a tensor saved already has none of its own.
    """

    name: str
    kind: str
    format: str
    part: str
    shape: tuple[int, ...]
    bytes: int
    module: str
    readers: list[tuple[str, str, str]] = field(default_factory=list)


def nbytes(value: Any) -> int:
    """Bytes of a fake value's elements; a tuple's are its parts'. A dynamic size counts with its hint."""
    if isinstance(value, Tensor):
        return int(value.numel()) * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, tuple | list) else 0


def role_of(node: Node) -> tuple[str, str] | None:
    """Linear and role of a GEMM's node; None for any other node."""
    if node.target not in PRODUCTS:  # Inductor's patterns hand a product's metadata on
        return None
    name, _, role = str(node.meta.get("fp4", "")).rpartition(" ")
    return (name, role) if name and role in ROLES else None


def _base(node: Node) -> Node:
    """The tensor whose storage a node shares."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def operand_sources(node: Node, operand: int) -> Iterator[Node]:
    """What an operand of a product is prepared from: back through decode, quantize, rotation, views and casts, all included."""
    argument = (node.args[-2:] if node.target in TAKES_BIAS_FIRST else node.args)[operand]
    stack, seen = [argument], set()
    while stack:
        at: Any = stack.pop()
        if not isinstance(at, Node) or at in seen:
            continue
        seen.add(at)
        yield at
        if at.op == "call_function" and (at.target in PREPARATION or getattr(at.target, "namespace", "") == "fp4"):
            stack.extend(at.all_input_nodes)


def saved_tensors(captured: Captured) -> list[Saved]:
    """What the forward graph hands to the backward, in the backward's order; empty for an inference graph."""
    forward, backward = captured.forward, captured.backward
    if forward is None or backward is None:
        return []
    made = {n.name: n for n in forward.graph.output_node().args[0] if isinstance(n, Node)}  # type: ignore[union-attr]
    taken = [n for n in backward.graph.find_nodes(op="placeholder") if n.name in made]
    readers = _readers(captured, backward.graph.nodes)
    user_outputs = _user_outputs(forward.graph.output_node(), {n.name for n in taken})
    for name, codes in _with_codes(made).items():  # a tensor scale is read through the product's alpha, by whom the codes are
        readers[name] = readers[codes]
    seen: set[Node] = set()
    found = []
    for placeholder in taken:
        node = made[placeholder.name]
        base = _base(node)
        kind = "saved"
        if base.op == "placeholder":
            kind = _input_kind(captured, base)
        elif base in user_outputs:
            kind = "output"
        value = base.meta["val"]
        size = 0 if base in seen else nbytes(value)
        seen.add(base)
        format_, part = _format(base)
        shape = tuple(int(s) for s in value.shape) if isinstance(value, Tensor) else ()
        found.append(Saved(node.name, kind, format_, part, shape, size, path_of(base), readers[placeholder.name]))
    return found


def _with_codes(made: dict[str, Node]) -> dict[str, str]:
    """Name of a saved tensor scale -> name of the saved codes of the same quantize."""
    parts = {}
    for name, node in made.items():
        if node.target is operator.getitem and node.args[0].target is fp4.quantize.default:  # type: ignore[union-attr]
            parts[node.args[0], node.args[1]] = name
    return {name: parts[q, 0] for (q, index), name in parts.items() if index == 2 and (q, 0) in parts}


def _user_outputs(output: Node, saved: set[str]) -> set[Node]:
    """Bases of what the graph returns to the user: its outputs before the first saved one, as AOTAutograd orders them."""
    values = [n for n in output.args[0] if isinstance(n, Node)]  # type: ignore[union-attr]
    first = next(
        (i for i, n in enumerate(values) if n.name in saved and n.name not in {v.name for v in values[:i]}), len(values)
    )
    repeated = {n for n in values if values.count(n) > 1}
    return {_base(n) for n in values[:first]} | {_base(n) for n in repeated}


def _input_kind(captured: Captured, placeholder: Node) -> str:
    index = input_index(placeholder)
    known = captured.context.inputs.get(index) if index is not None else None
    return "parameter" if known is not None and known.is_parameter else "input"


def _format(base: Node) -> tuple[str, str]:
    value = base.meta["val"]
    dtype = SHORT.get(value.dtype, str(value.dtype)) if isinstance(value, Tensor) else type(value).__name__
    source = base.args[0] if base.target is operator.getitem else base
    if isinstance(source, Node) and source.target is fp4.quantize.default:
        quantizer = str(source.args[2]).partition("[")[0]
        return quantizer, PARTS[int(base.args[1])]  # type: ignore[arg-type]
    if base.op == "placeholder":
        return dtype, base.name
    names: dict[Any, str] = {fp4.amax.default: "amax", fp4.clip_mask.default: "clip mask", fp4.seed.default: "seed"}
    return dtype, names.get(base.target, target_of(source) if isinstance(source, Node) else base.name)


def _readers(captured: Captured, nodes: Any) -> dict[str, list[tuple[str, str, str]]]:
    slots = {(x.site.name, str(role)): gemm for x in captured.context.linears for role, gemm in x.gemms.items()}
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for node in nodes:
        mark = role_of(node)
        gemm = slots.get(mark) if mark else None
        if mark is None or gemm is None:
            continue
        for operand, letter in enumerate(OPERANDS[gemm.role]):
            slot = operand if node.target is GROUPED else gemm.slot(operand)
            for source in operand_sources(node, slot):
                reader = (*mark, letter)
                if source.op == "placeholder" and reader not in found[source.name]:
                    found[source.name].append(reader)
    return found
