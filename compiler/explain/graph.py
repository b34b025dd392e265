"""The dataflow of a captured model as networkx graphs: one of its ops, and one of its linears with what lies between them.

In the second a node is a linear (its three GEMMs together) or a step between linears: neighbouring ops of one module.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import Tensor
from torch.fx import Node

from fp4.compiler.explain.capture import Captured, ExplainError
from fp4.compiler.explain.fx import SHORT, is_backward, path_of, target_of, type_of
from fp4.compiler.explain.repeats import Run, runs, split
from fp4.compiler.explain.saved import nbytes, role_of, saved_tensors
from fp4.compiler.graph import COPIES, VIEWS
from fp4.compiler.report import LinearReport

fp4 = torch.ops.fp4
RESULTS = (fp4.mm.default, fp4.grouped_mm.default, fp4.unrotate.default, fp4.apply_mask.default)
TRANSPARENT = frozenset({operator.getitem, *VIEWS, *COPIES})


@dataclass
class Row:
    """A linear, or a step between linears.

    name: the linear's, or PATH.#N for the N-th step of a module. ops: what it calls, the commonest first. saved: (format, what,
    bytes) that forward keeps for backward; what: the operand's letter for a linear's, else "". shared: what it reads of another
    row's saved tensors: (letter, that row's name). differentiable: has it a backward?
    """

    name: str
    path: str
    linear: LinearReport | None = None
    ops: list[str] = field(default_factory=list)
    saved: list[tuple[str, str, int]] = field(default_factory=list)
    shared: list[tuple[str, str]] = field(default_factory=list)
    differentiable: bool = False
    run: Run | None = None

    @property
    def title(self) -> str:
        """What to call it in a drawing: the last part of its path."""
        if self.linear is not None:
            return self.linear.name
        if any("attention" in op for op in self.ops):
            return f"{self.path}: attention"
        return self.path or "the model"


def format_of(node: Node) -> str:
    """A tensor's format: its quantizer's name for codes and what is decoded from them, else its dtype."""
    at: Any = node
    while at.op == "call_function" and (
        at.target in TRANSPARENT or at.target in (fp4.dequantize.default, fp4.quantize.default)
    ):
        if at.target is fp4.quantize.default:
            return str(at.args[2]).partition("[")[0]
        at = at.args[0]
    value = node.meta.get("val")
    return SHORT.get(value.dtype, str(value.dtype)) if isinstance(value, Tensor) else ""


def ops(captured: Captured) -> nx.DiGraph:
    """Every node of the rewritten graph, with op, type, bytes, format, module path, backward; a GEMM's with linear and role."""
    found = nx.DiGraph()
    for node in captured.rewritten.nodes:
        value = node.meta.get("val")
        about = {"op": target_of(node) if node.op == "call_function" else node.op, "type": type_of(value)}
        mark = role_of(node) or (None, None)
        found.add_node(
            node.name, **about, bytes=nbytes(value), format=format_of(node), path=path_of(node), backward=is_backward(node),
            linear=mark[0], role=mark[1],
        )  # fmt: skip
        found.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
    return found


def flow(captured: Captured, collapse: bool = False, layer: str | None = None) -> nx.MultiDiGraph:
    """Linears and steps between them. Nodes are names, with ``row``, a Row, and ``order``, the order of execution.

    Edges: ``direction`` "forward" or "backward", ``bytes`` and ``format`` of what flows. collapse: of layers that are alike
    only one is kept, its rows' ``run`` saying how many there are.
    layer: only what lies in the module of that name, e.g. model.layers.0. Raises ExplainError where that is nothing.
    """
    made = _Rows(captured)
    found = nx.MultiDiGraph()
    for order, row in enumerate(made.rows.values()):
        found.add_node(row.name, row=row, order=order)
    for (source, target, direction), (size, format_) in made.edges().items():
        found.add_edge(source, target, key=direction, direction=direction, bytes=size, format=format_)
    if layer is not None:
        inside = [n for n in found if n == layer or n.startswith(f"{layer}.")]
        if not inside:
            linears = [row.name for row in made.rows.values() if row.linear]
            raise ExplainError(f"no module {layer!r} in the graph; its linears: {', '.join(linears[:12])}, ...")
        found = found.subgraph(inside).copy()
    return _collapsed(found) if collapse else found


class _Rows:
    """Assigns every computing node to a row."""

    def __init__(self, captured: Captured) -> None:
        self.graph = captured.rewritten
        assert captured.report is not None
        reports = {x.name: x for x in captured.report.linears}
        self.rows: dict[str, Row] = {}
        self.of: dict[Node, str] = {}
        self.linear_of_seq: dict[Any, str] = {}
        for node in self.graph.nodes:
            mark = role_of(node)
            if mark and mark[1] == "fprop" and "seq_nr" in node.meta and not is_backward(node):
                self.linear_of_seq.setdefault(node.meta["seq_nr"], mark[0])
        inference = all(not is_backward(n) for n in self.graph.nodes)
        self._forward(reports, by_mark=inference)
        self._backward()
        self._saved(captured)

    def _computing(self, backward: bool) -> Iterator[Node]:
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target not in TRANSPARENT and is_backward(node) == backward:
                yield node

    def _forward(self, reports: dict[str, LinearReport], by_mark: bool) -> None:
        pending: list[Node] = []  # an inference graph has one seq_nr for all: an operand belongs to the product after it
        counts: dict[str, int] = {}
        last: tuple[str, str] | None = None
        for node in self._computing(backward=False):
            mark = role_of(node)
            ours = getattr(node.target, "namespace", "") == "fp4"
            if node.target is fp4.seed.default or not _carries(node):
                continue
            if mark is None and by_mark and (ours or _alpha(node)):
                pending.append(node)
                continue
            linear = mark[0] if mark else None if by_mark else self.linear_of_seq.get(node.meta.get("seq_nr"))
            if linear is not None and linear in reports:
                row = self.rows.setdefault(linear, Row(linear, linear, reports[linear]))
                for at in (*pending, node):
                    self.of[at] = row.name
                pending, last = [], None
                continue
            path = path_of(node)
            if last is None or last[0] != path:
                counts[path] = counts.get(path, -1) + 1
                name = f"{path}.#{counts[path]}".lstrip(".")
                self.rows[name] = Row(name, path)
                last = (path, name)
            self.of[node] = last[1]
            self.rows[last[1]].ops.append(target_of(node).partition(".")[2])

    def _backward(self) -> None:
        by_seq: dict[Any, str] = {}
        by_path: dict[str, str] = {}
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        for node, name in self.of.items():
            by_seq.setdefault(node.meta.get("seq_nr"), name)
            by_path[self.rows[name].path] = name
        for node in self._computing(backward=True):
            mark = role_of(node)
            path = path_of(node)
            place: str | None = mark[0] if mark else by_seq.get(node.meta.get("seq_nr"), by_path.get(path) if path else None)
            if place is None:  # autograd's sums of gradients have no place: that of the gradient that comes last
                terms = [p for a in node.all_input_nodes if (p := _producer(a)) in self.of and is_backward(p)]
                place = self.of[max(terms, key=lambda n: position[n])] if terms else None
            if place is not None and place in self.rows:
                self.of[node] = place
                self.rows[place].differentiable = True

    def _saved(self, captured: Captured) -> None:
        names = {n.name: n for n in self.graph.nodes}
        by_path = {row.path: row for row in self.rows.values()}
        for tensor in saved_tensors(captured):
            if tensor.kind != "saved" or tensor.part == "seed":
                continue
            readers = [r for r in tensor.readers if r[0] in self.rows]
            node = names.get(tensor.name)
            made_by = self.rows.get(self.of.get(_producer(node), "")) if node is not None else None
            row = self.rows[readers[0][0]] if readers else made_by or by_path.get(tensor.module)
            if readers:  # q, k and v read one tensor: it is drawn at the first in order
                order = list(self.rows)
                readers = sorted(readers, key=lambda r: order.index(r[0]))
                row = self.rows[readers[0][0]]
                for name, _, letter in readers[1:]:
                    if name != row.name and (letter, row.name) not in self.rows[name].shared:
                        self.rows[name].shared.append((letter, row.name))
            if row is not None and tensor.bytes:
                row.saved.append((tensor.format, readers[0][2] if readers else "", tensor.bytes))

    def edges(self) -> dict[tuple[str, str, str], tuple[int, str]]:
        """(source row, target row, direction) -> bytes and format of the largest tensor that flows."""
        found: dict[tuple[str, str, str], tuple[int, str]] = {}
        for node, name in self.of.items():
            backward = is_backward(node)
            for source in node.all_input_nodes:
                for producer in self._producers(source):
                    origin = self.of[producer]
                    if backward and getattr(producer.target, "namespace", "") == "fp4" and producer.target not in RESULTS:
                        continue  # a decoded copy that two rows read is no gradient
                    if origin != name and is_backward(producer) == backward:
                        key = (origin, name, "backward" if backward else "forward")
                        found[key] = max(found.get(key, (0, "")), (_flowing(source), format_of(source)))
        return {k: v for k, v in found.items() if v[0] > 8}

    def _producers(self, node: Node) -> set[Node]:
        """The nodes with a row that a node's value comes from, through views, casts and sums of gradients."""
        found: set[Node] = set()
        stack, seen = [node], set()
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            if at in self.of:
                found.add(at)
            elif at.op == "call_function":
                stack.extend(at.all_input_nodes[:1] if at.target in TRANSPARENT else at.all_input_nodes)
        return found


def _flowing(node: Node) -> int:
    """Bytes that flow along an edge: of the codes and scales where the tensor is decoded from them."""
    if node.target is fp4.dequantize.default:
        return sum(nbytes(a.meta["val"]) for a in node.args[:2] if isinstance(a, Node))
    return nbytes(node.meta.get("val"))


def _carries(node: Node) -> bool:
    """Does the node compute on real numbers? Masks and positions are no step of the model."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.dtype == torch.uint8) for v in values)


def _alpha(node: Node) -> bool:
    return bool(node.users) and all(u.target is fp4.mm.default for u in node.users)


def _producer(node: Any) -> Any:
    while isinstance(node, Node) and node.op == "call_function" and node.target in TRANSPARENT:
        node = node.args[0]
    return node


def _collapsed(found: nx.MultiDiGraph) -> nx.MultiDiGraph:
    signatures = {}
    for name in sorted(found, key=lambda n: found.nodes[n]["order"]):
        row: Row = found.nodes[name]["row"]
        gemms = tuple((g.role, tuple(g.operands.items()), g.rotation) for g in row.linear.gemms) if row.linear else ()
        signatures[name] = (gemms, tuple(row.ops), tuple(sorted(x for x in row.saved if x[1])))
    run = runs(signatures)
    representative = {}
    for name in signatures:
        representative[name] = name
        if name in run:
            prefix, _, rest = split(name)  # type: ignore[misc]
            # the second: what the partitioner saves beside the linears' operands often differs in the first
            number = run[name].first + (run[name].count > 2)
            representative[name] = f"{prefix}{number}{rest}"
    made = nx.MultiDiGraph()
    for name in signatures:
        if representative[name] == name:
            made.add_node(name, **found.nodes[name])
            made.nodes[name]["row"].run = run.get(name)
    for source, target, key, about in found.edges(keys=True, data=True):
        a, b = representative[source], representative[target]
        down = made.nodes[a]["order"] < made.nodes[b]["order"]
        if a != b and down == (key == "forward"):  # else from one layer of a run to its next
            made.add_edge(a, b, key=key, **about)
    return made
