"""One linear at every level: its part of the graph as captured, rewritten and lowered, as MLIR, its kernels down to SASS."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp4.compiler.explain import fx, mlir
from fp4.compiler.explain.capture import Captured, ExplainError
from fp4.compiler.explain.saved import PREPARATION, PRODUCTS, operand_sources
from fp4.compiler.sites import ROLES
from fp4.runtime.spec import Quantizer, Rotation

fp4 = torch.ops.fp4
KERNEL_LEVELS = ("source", "ttir", "ttgir", "ptx", "sass")
_ENCODING = re.compile(r"\s*/\* 0x[0-9a-f]+ \*/")
SCALED = ("product", "scaled_mm", "library_scaled_mm", "fp8_mm", "fp8_block_mm")
INPUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class KernelLevels:
    """One generated kernel of a target. op: the node that calls it. spec: what it does. source: Triton. resources: registers a
    thread, bytes of shared memory a program, spills."""

    op: str
    spec: str
    source: str
    ttir: str
    ttgir: str
    ptx: str
    sass: str
    resources: str


@dataclass(frozen=True)
class Levels:
    """A linear, top to bottom. graph: (stage, code). mlir: the rewritten part. kernels: empty for a CPU, and in BF16."""

    linear: str
    target: str
    graph: tuple[tuple[str, str], ...]
    mlir: str
    kernels: tuple[KernelLevels, ...]

    def sections(self) -> Iterator[tuple[str, str]]:
        """(title, text) of every level, in order."""
        yield from ((f"FX, {stage}", text) for stage, text in self.graph)
        yield "MLIR, rewritten", self.mlir
        for kernel in self.kernels:
            for level in KERNEL_LEVELS:
                title = "Triton" if level == "source" else level.upper()
                yield f"{title} of {kernel.op} for {self.target} ({kernel.resources})", getattr(kernel, level)

    def __str__(self) -> str:
        return "\n\n".join(f"==== {title}\n{text.rstrip()}" for title, text in self.sections())


def levels(captured: Iterable[Captured], lowered: Iterable[dict[str, GraphModule]], linear: str, target: str) -> Levels:
    """Every level of the linear of that name. Raises ExplainError for an unknown one."""
    names = []
    for graph, pair in zip(captured, lowered, strict=True):
        known = [x.site.name for x in graph.context.linears]
        names += known
        if linear in known:
            return _levels(graph, pair, linear, target)
    raise ExplainError(f"no linear {linear!r}; write one of {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}")


def _levels(graph: Captured, lowered: dict[str, GraphModule], linear: str, target: str) -> Levels:
    captured = {n for n in graph.stages["captured"].nodes if n.op == "call_function" and fx.path_of(n) == linear}
    rewritten = _part(graph.rewritten, _serving(graph, graph.rewritten, linear))
    shown = [("captured", fx.code(_part(graph.stages["captured"], captured), "captured", graph.context.inputs))]
    shown.append(("rewritten", fx.code(rewritten, "rewritten", graph.context.inputs)))
    saved: set[str] = set()
    calls: list[Node] = []
    for name in reversed(lowered):  # backward first: the codes it reads are made in forward
        gm = lowered[name]
        nodes = _serving(graph, gm.graph, linear)
        outputs = {n.name: n for n in gm.graph.nodes}
        for made in (outputs[s] for s in saved if s in outputs):
            nodes |= {made, *_up(made)}
        saved |= {n.name for n in nodes if n.op == "placeholder"}
        nodes = {n for n in nodes if n.op == "call_function"}
        shown.insert(2, (f"lowered, {name}", fx.code(_part(gm.graph, nodes), f"lowered_{name}", graph.context.inputs)))
        calls = [n for n in gm.graph.nodes if n in nodes] + calls
    kernels = tuple(_kernels(calls, target)) if target != "cpu" else ()
    return Levels(linear, target, tuple(shown), mlir.mlir(rewritten, "rewritten"), kernels)


def _serving(captured: Captured, graph: Graph, linear: str) -> set[Node]:
    """The linear's products, what prepares their operands, and the graph inputs that is made from."""
    found: set[Node] = set()
    for node in graph.nodes:
        name, _, role = str(node.meta.get("fp4", "")).rpartition(" ")
        if name != linear or role not in ROLES or not (node.target in PRODUCTS or _is_scaled(node)):
            continue
        found.add(node)
        if _is_scaled(node):
            found |= set(_up(node))
        else:
            found |= {s for operand in (0, 1) for s in operand_sources(node, operand)}
            alpha = node.args[2] if node.target is fp4.mm.default else None
            found |= {alpha} if isinstance(alpha, Node) else set()
        found = {n for n in found if n.op == "placeholder" or n.op == "call_function"}
    return {n for n in found if n.op == "placeholder" or _prepares(n) or n.meta.get("fp4", "").rpartition(" ")[0] == linear}


def _is_scaled(node: Node) -> bool:
    """Is the node a product that is one op: of codes, of FP8 tensors made of them, or of BF16 with nothing after it?"""
    return getattr(node.target, "_opname", "") in SCALED


def _prepares(node: Node) -> bool:
    ours = getattr(node.target, "namespace", "") == "fp4" and node.target not in (fp4.mm.default, fp4.seed.default)
    factor = bool(node.users) and all(u.target is fp4.mm.default for u in node.users)
    return (ours and not _is_scaled(node)) or node.target in PREPARATION or factor


def _up(node: Node) -> Iterator[Node]:
    """What prepares a node's operands: back through our ops, getitems, views."""
    stack, seen = list(node.all_input_nodes), set()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        yield at
        if at.op == "call_function" and _prepares(at):
            stack.extend(at.all_input_nodes)


def _part(graph: Graph, nodes: set[Node]) -> Graph:
    """A graph of the nodes alone; what they read from outside is a placeholder, what is read outside or by none an output."""
    part = Graph()
    copies: dict[Node, Node] = {}
    inside = [n for n in graph.nodes if n in nodes and n.op == "call_function"]
    outside = dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in nodes or a.op != "call_function")
    for node in outside:
        copies[node] = part.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = dict(node.meta)
        copies[node].meta.pop("fp4", None)
    for node in inside:
        copies[node] = part.node_copy(node, lambda n: copies[n])
    results = [copies[n] for n in inside if not n.users or any(u not in nodes for u in n.users)]
    part.output([r for r in results if not isinstance(r.meta.get("val"), tuple)])
    return part


def _kernels(calls: Iterable[Node], target: str) -> Iterator[KernelLevels]:
    from fp4.kernels.target import Target

    seen = set()
    for node in calls:
        made = _compiled(node, Target(target))
        if made is None or made[1] in seen:
            continue
        spec, source, compiled = made
        seen.add(source)
        resources = f"{compiled.registers} registers, {compiled.shared} bytes shared, {compiled.spills} bytes spilled"
        name = f"{fx.target_of(node)} {node.name}"
        sass = "\n".join(filter(None, (_ENCODING.sub("", line).rstrip() for line in compiled.sass.splitlines())))
        yield KernelLevels(name, str(spec), source, compiled.ttir, compiled.ttgir, compiled.ptx, sass, resources)


def _compiled(node: Node, target: Any) -> Any:
    """Specification, Triton source and compiled kernel of a call; None for an op that is none of the generated kernels."""
    from fp4.kernels.codegen import source
    from fp4.kernels.compile import compile_kernel
    from fp4.kernels.matmul_codegen import source as matmul_source
    from fp4.kernels.matmul_compile import compile_matmul
    from fp4.kernels.matmul_spec import MatmulSpec, format_of, tiles

    name = getattr(node.target, "_opname", "")
    if name == "scaled_mm":
        arguments = _arguments(node)
        a, b = (format_of(Quantizer.parse(arguments[q])) for q in ("a_quantizer", "b_quantizer"))
        alphas = sum(arguments[x] is not None for x in ("a_alpha", "b_alpha"))
        bias = arguments["bias"]
        output = INPUT[arguments["dtype"]]
        spec = MatmulSpec(a, b, output, alphas, INPUT[bias.meta["val"].dtype] if bias is not None else None)  # type: ignore[arg-type]
        tile = tiles(spec, target)[0]
        return spec, matmul_source(spec, target, tile), compile_matmul(spec, target, tile)
    if name in ("rotate_quantize", "fake_quantize", "requantize", "fake_requantize"):
        made = _quantize_spec(node, name)
        return made, source(made, target), compile_kernel(made, target)
    return None


def _arguments(node: Node) -> dict[str, Any]:
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _quantize_spec(node: Node, name: str) -> Any:
    """The specification that the launcher would make of the call's arguments."""
    from fp4.kernels.kernelspec import KernelSpec
    from fp4.kernels.packed import PackedSpec

    a = _arguments(node)
    q = Quantizer.parse(a["quantizer"])
    rotation = Rotation.parse(a["rotation"]) if a["rotation"] else None
    fields: dict[str, Any] = {"quantizer": q, "rotation": rotation}
    fields |= {"output": "packed"} if not name.startswith("fake") else {"output": "decoded", "scaled": bool(q.outer)}
    if name.startswith("fake"):
        fields["dtype"] = INPUT[a["dtype"]]
    elif a.get("swizzled"):
        fields["scale_layout"] = "swizzled"
    if "requantize" in name:
        of = Quantizer.parse(a["source"])
        factor = "none" if a["factor"] is None else "outer" if of.has_outer_scale else "tensor"
        memory = "columns" if a["transposed"] else "rows"
        ragged = int(a["columns"]) % 8 != 0
        return PackedSpec(source=of, factor=factor, input=INPUT[a["decoded"]], memory=memory, ragged=ragged, **fields)
    x = a["x"].meta["val"]
    columns = x.stride(0) == 1 and x.stride(1) != 1 and x.shape[1] > 1
    fields["factored"] = a.get("factor") is not None
    return KernelSpec(memory="columns" if columns else "rows", input=INPUT[x.dtype], **fields)
