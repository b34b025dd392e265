"""A graph as MLIR: torch-mlir's ``torch`` dialect, and a dialect ``fp4`` for our ops, declared in IRDL.

The dialect is written from the ops' schemas, so the two cannot drift apart: tensors are operands, everything else is an
attribute whose kind is verified. MLIR is for reading and checking; code generation does not go through it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp4.compiler.explain.capture import ExplainError
from fp4.compiler.explain.fx import SHORT
from fp4.compiler.graph import fp4_nodes
from fp4.runtime.spec import Quantizer, Rotation, SpecError

# Attribute kinds by the schema's types, in IRDL.
KINDS = {
    "str": 'irdl.base "#builtin.string"',
    "int": 'irdl.base "#builtin.integer"',
    "SymInt": 'irdl.base "#builtin.integer"',
    "Device": 'irdl.base "#builtin.string"',
    "bool": 'irdl.base "#builtin.integer"',
    "float": 'irdl.base "#builtin.float"',
}
LIST = 'irdl.base "#builtin.array"'
DTYPES = ("bf16", "f16", "f32", "float8_e4m3fn", "float8_e5m2")
ROLE = ("linear", "role")  # attributes of fp4.mm beyond its schema's: which GEMM it is
SEGMENTS = "operandSegmentSizes"


def schemas() -> Iterator[tuple[str, Any]]:
    """Name and schema of every ``fp4::`` op, in the order of names."""
    import fp4.kernels.fp8_ops
    import fp4.kernels.matmul_ops
    import fp4.kernels.ops  # noqa: F401  registers the ops of the lowered graphs

    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fp4::"))
    for name in names:
        op = name.removeprefix("fp4::")
        yield op, getattr(torch.ops.fp4, op).default._schema


def _tensor(argument: Any) -> tuple[bool, bool]:
    """Is the argument a tensor, and may it be left out?"""
    kind = str(argument.type)
    return kind in ("Tensor", "Optional[Tensor]"), kind == "Optional[Tensor]"


def _attribute_kind(kind: str) -> str:
    """The IRDL constraint of an attribute of a schema's type."""
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    return LIST if inner.startswith("List[") else KINDS[inner]


@functools.cache
def dialect() -> str:
    """The IRDL declaration of the dialect."""
    lines = ["irdl.dialect @fp4 {"]
    for name, schema in schemas():
        lines += _operation(name, schema)
    return "\n".join([*lines, "}", ""])


def _operation(name: str, schema: Any) -> list[str]:
    body, operands, attributes = [], [], []
    for a in schema.arguments:
        is_tensor, optional = _tensor(a)
        if is_tensor:
            body.append(f'%{a.name} = irdl.base "!torch.vtensor"')
            operands.append(f"{a.name}: {'optional ' if optional else ''}%{a.name}")
        elif str(a.real_type) == "ScalarType":  # type says int
            body += [f'%{a.name}_{short} = irdl.is "{short}"' for short in DTYPES]
            body.append(f"%{a.name} = irdl.any_of({', '.join(f'%{a.name}_{short}' for short in DTYPES)})")
            attributes.append(a.name)
        else:
            kind = _attribute_kind(str(a.type))
            if str(a.type).startswith("Optional"):
                body += [f"%{a.name}_given = {kind}", f"%{a.name}_absent = irdl.is unit"]
                body.append(f"%{a.name} = irdl.any_of(%{a.name}_given, %{a.name}_absent)")
            else:
                body.append(f"%{a.name} = {kind}")
            attributes.append(a.name)
    if name == "mm":
        body.append(f"%linear = {KINDS['str']}")
        body += [f'%role_{r} = irdl.is "{r}"' for r in ("fprop", "dgrad", "wgrad")]
        body.append("%role = irdl.any_of(%role_fprop, %role_dgrad, %role_wgrad)")
        attributes += ROLE
    results = [f"result{i}" for i in range(len(schema.returns))]
    body += [f'%{r} = irdl.base "!torch.vtensor"' for r in results]
    if operands:
        body.append(f"irdl.operands({', '.join(operands)})")
    body.append(f"irdl.results({', '.join(f'{r}: %{r}' for r in results)})")
    if attributes:
        named = ", ".join(f'"{a}" = %{a}' for a in attributes)
        body.append(f"irdl.attributes {{{named}}}")
    return [f"  irdl.operation @{name} {{", *(f"    {line}" for line in body), "  }"]


def _require() -> None:
    try:
        import torch_mlir  # noqa: F401
    except ImportError as error:
        raise ExplainError("mlir needs torch-mlir, which is not installed; write: pip install torch-mlir") from error


def context() -> Any:
    """A new MLIR context with the torch and fp4 dialects."""
    _require()
    from torch_mlir import ir
    from torch_mlir.dialects import irdl
    from torch_mlir.dialects import torch as torch_dialect

    made = ir.Context()
    torch_dialect.register_dialect(made)
    with made:
        irdl.load_dialects(ir.Module.parse(dialect()))
    return made


def parse(text: str) -> Any:
    """The module of a printed text, verified: operands, results and attributes of every op, quantizers and rotations read.

    Raises ExplainError, with MLIR's message, for a text that does not parse or verify.
    """
    made = context()
    from torch_mlir import ir

    try:
        module = ir.Module.parse(text, made)
        module.operation.verify()
        _read_specifications(module)
    except (ir.MLIRError, SpecError) as error:
        raise ExplainError(f"not a valid module: {error}") from error
    return module


def _read_specifications(made: Any) -> None:
    """Read every quantizer and rotation attribute: IRDL can say that they are strings, not which. Raises SpecError."""
    from torch_mlir import ir

    found: list[tuple[Any, str]] = []

    def visit(op: Any) -> Any:
        for name, kind in (("quantizer", Quantizer), ("rotation", Rotation)):
            if op.name.startswith("fp4.") and name in op.attributes:
                found.append((kind, ir.StringAttr(op.attributes[name]).value))
        return ir.WalkResult.ADVANCE

    made.operation.walk(visit)
    for kind, text in dict.fromkeys(found):
        if text:  # empty: a kernel without a rotation
            kind.parse(text)


def module(graph: Graph | GraphModule, title: str) -> Any:
    """The graph as a verified MLIR module with one function, named `title`.

    Raises ExplainError for a graph with what torch-mlir does not import, such as subgraphs.
    """
    _require()
    from torch_mlir.extras.fx_importer import FxImporter

    graph = copy.deepcopy(graph.graph if isinstance(graph, GraphModule) else graph)
    importer = FxImporter(context=context())
    try:
        importer.import_stateless_graph(graph, func_name=title)
    except NotImplementedError as error:
        raise ExplainError(f"torch-mlir imports no such graph ({error}); write another stage, such as 'rewritten'") from error
    made = importer.module
    _name_ops(made, list(fp4_nodes(graph)))
    made.operation.verify()
    _read_specifications(made)
    return made


def mlir(graph: Graph | GraphModule, title: str) -> str:
    """The module of a graph, printed. What is printed parses and verifies again."""
    return str(module(graph, title))


def _name_ops(made: Any, nodes: list[Node]) -> None:
    """``torch.operator "torch.fp4.quantize"`` -> ``fp4.quantize``: constant operands become attributes."""

    body = [op.operation for f in made.body.operations for op in f.regions[0].blocks[0].operations]
    operators = [op for op in body if op.name == "torch.operator" and "torch.fp4." in str(op.attributes["name"])]
    for op, node in zip(operators, nodes, strict=True):
        with made.context, op.location:
            _replace(op, node)


def _replace(op: Any, node: Node) -> None:
    from torch_mlir import ir

    target: Any = node.target
    operands, segments, constants = [], [], []
    attributes: dict[str, Any] = {}
    optional = 0
    values = [*node.args, *(a.default_value for a in target._schema.arguments[len(node.args) :])]
    for argument, value, operand in zip(target._schema.arguments, values, op.operands, strict=True):
        is_tensor, may_miss = _tensor(argument)
        optional += may_miss
        if is_tensor and value is not None:
            operands.append(operand)
        else:
            constants.append(operand.owner)
        if is_tensor:
            segments.append(int(value is not None))
        else:
            attributes[argument.name] = _attribute(value)
    if optional > 1:
        attributes[SEGMENTS] = ir.DenseI32ArrayAttr.get(segments)
    if target._opname == "mm":
        linear, _, role = str(node.meta.get("fp4", "")).rpartition(" ")
        attributes |= {"linear": ir.StringAttr.get(linear), "role": ir.StringAttr.get(role)}
    made = ir.Operation.create(
        f"fp4.{target._opname}", [r.type for r in op.results], operands, attributes, ip=ir.InsertionPoint(op)
    )
    for old, new in zip(op.results, made.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()
    for constant in constants:
        if not any(True for r in constant.results for _ in r.uses):
            constant.erase()


def _attribute(value: Any) -> Any:
    from torch_mlir import ir

    if value is None:
        return ir.UnitAttr.get()
    if isinstance(value, torch.dtype):
        return ir.StringAttr.get(SHORT.get(value, str(value).removeprefix("torch.")))
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    if isinstance(value, list | tuple):
        return ir.ArrayAttr.get([_attribute(v) for v in value])
    return ir.StringAttr.get(str(value))
