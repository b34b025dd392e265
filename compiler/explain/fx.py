"""A graph as readable code: one line a node, its type, the module it came from, which GEMM of which linear it is."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fp4.compiler.sites import Input, input_index

SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "b8",
}


def type_of(value: Any) -> str:
    """A fake value's type: bf16[64, 96]; of a tuple, its parts'."""
    if isinstance(value, Tensor):
        dtype = SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(type_of(v) for v in value)})"
    return type(value).__name__


def target_of(node: Node) -> str:
    """The op a node calls, as one would write it: aten.mm, aten.sum.dim_IntList, fp4.quantize."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def path_of(node: Node) -> str:
    """The module a node serves, from the model's root: model.layers.0.mlp; empty at the root or when unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return re.sub(r"^(?:[LG]\['[^']*'\]|_?\w*self\w*)\.?", "", path) if "[" in path else path


def is_backward(node: Node) -> bool:
    return (
        str(node.meta.get("partitioner_tag", "")).endswith("in_backward") or node.meta.get("partitioner_tag") == "is_backward"
    )


def _written(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_written, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)


def _statement(node: Node) -> str:
    left = f'{node.name}: "{type_of(node.meta.get("val"))}"' if "val" in node.meta else node.name
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.target is operator.getitem:
        return f"{left} = {_written(node.args[0])}[{node.args[1]}]"
    arguments = [*map(_written, node.args), *(f"{k}={_written(v)}" for k, v in node.kwargs.items())]
    return f"{left} = {target_of(node)}({', '.join(arguments)})"


def _lines(graph: Graph, title: str, inputs: dict[int, Input]) -> Iterator[str]:
    yield f"def {title}("
    for node in graph.find_nodes(op="placeholder"):
        index = input_index(node)
        known = inputs.get(index) if index is not None else None
        yield f'    {node.name}: "{type_of(node.meta.get("val"))}",' + (f"  # {known.name}" if known else "")
    yield "):"
    place: tuple[str, bool] | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            yield f"    return {_written(node.args[0])}"
            continue
        here = (path_of(node), is_backward(node))
        if here != place:
            yield f"    # {here[0] or 'the model'}, {'backward' if here[1] else 'forward'}"
            place = here
        mark = node.meta.get("fp4")
        yield f"    {_statement(node)}" + (f"  # {mark}" if mark else "")


def code(graph: Graph | GraphModule, title: str, inputs: dict[int, Input] | None = None) -> str:
    """The graph as code. inputs: Dynamo's names, shown beside a joint graph's placeholders. Subgraphs follow it."""
    module = graph if isinstance(graph, GraphModule) else None
    text = "\n".join(_lines(module.graph if module else graph, title, inputs or {}))  # type: ignore[arg-type]
    parts = [text]
    if module is not None:
        for name, child in module.named_children():
            if isinstance(child, GraphModule):
                parts.append(code(child, name))
    return "\n\n".join(parts)


def diff(first: str, second: str, names: tuple[str, str], context: int = 2) -> str:
    """Unified diff of two listings; empty when they are equal."""
    lines = difflib.unified_diff(first.splitlines(), second.splitlines(), *names, n=context, lineterm="")
    return "\n".join(lines)
