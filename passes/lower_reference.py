"""Inline the oracle: every ``fp4::`` op becomes the ATen nodes of ``fp4.runtime.reference``, which Inductor fuses.

Runs after partitioning, on the forward, backward and inference graphs, so the partitioner has seen opaque ops and saves
their packed codes. A dequantize whose codes are made in the same graph takes the unpacked values: same bits, no unpacking.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp4.compiler.graph import SERVED_META, fp4_nodes
from fp4.runtime import layout, reference
from fp4.runtime.spec import Quantizer, Rotation


@dataclass(frozen=True)
class LowerReference:
    name: ClassVar[str] = "lower_reference"

    def run(self, graph: Graph) -> bool:
        inliner = _Inliner(graph)
        nodes = list(fp4_nodes(graph))
        for node in nodes:
            inliner.lower(node)
        return bool(nodes)


class _Inliner:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.traced: dict[Any, GraphModule] = {}
        self.unpacked: dict[Node, tuple[Node, Node]] = {}  # codes -> code values and FP32 block scales

    def lower(self, node: Node) -> None:
        getattr(self, "_" + node.target._opname)(node, *node.args)  # type: ignore[union-attr]
        self.graph.erase_node(node)

    def _replace(self, node: Node, function: Callable[..., Any], tensors: Sequence[Node | None], key: Any) -> None:
        (result,) = self._inline(node, function, tensors, key)
        node.replace_all_uses_with(result)

    def _amax(self, node: Node, x: Node) -> None:
        self._replace(node, reference.amax, [x], "amax")

    def _rotate(self, node: Node, x: Node, rotation: str, seed: Node | None, site: int) -> None:
        spec = Rotation.parse(rotation)
        self._replace(node, lambda x, seed: reference.rotate(x, spec, seed, site), [x, seed], ("rotate", rotation, site))

    def _quantize(self, node: Node, x: Node, amax: Node | None, quantizer: str, seed: Node | None, site: int) -> None:
        q = Quantizer.parse(quantizer)

        def quantize(x: Any, amax: Any, seed: Any) -> tuple[Any, ...]:
            values, block_scales, codes, scales, tensor_scale = reference.quantize_values(x, q, amax, seed, site)
            return values, block_scales, layout.pack(codes) if q.packed else codes, scales, tensor_scale

        key = ("quantize", quantizer, site if q.needs_seed else 0)
        values, block_scales, *stored = self._inline(node, quantize, [x, amax, seed], key)
        self.unpacked[stored[0]] = values, block_scales
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(stored[user.args[1]])  # type: ignore[index]
            self.graph.erase_node(user)

    def _dequantize(
        self, node: Node, codes: Node, scales: Node, tensor_scale: Node | None, quantizer: str, columns: Any, dtype: torch.dtype
    ) -> None:
        q = Quantizer.parse(quantizer)
        if tensor_scale is None and codes in self.unpacked:
            values, block_scales = self.unpacked[codes]
            self._replace(
                node,
                lambda v, s, n: reference.decode_values(v, s, q, n, dtype),
                [values, block_scales, columns],
                ("decode_values", quantizer, dtype),
            )
            return

        def decode(codes: Any, scales: Any, tensor_scale: Any, n: Any) -> Any:
            if tensor_scale is None:
                return reference.decode(codes, scales, q, n, dtype)
            return reference.dequantize(codes, scales, tensor_scale, q, n, dtype)

        self._replace(node, decode, [codes, scales, tensor_scale, columns], ("decode", quantizer, dtype))

    def _mm(self, node: Node, a: Node, b: Node, alpha: Node | None, bias: Node | None, dtype: torch.dtype) -> None:
        self._replace(
            node, lambda a, b, alpha, bias: reference.mm(a, b, alpha, bias, dtype), [a, b, alpha, bias], ("mm", dtype)
        )

    def _swizzle(self, node: Node, scales: Node) -> None:
        self._replace(node, reference.swizzle, [scales], "swizzle")

    def _unswizzle(self, node: Node, data: Node, rows: Any, columns: Any) -> None:
        self._replace(node, reference.unswizzle, [data, rows, columns], "unswizzle")

    def _inline(self, node: Node, function: Callable[..., Any], args: Sequence[Any], key: Any) -> list[Node]:
        """Trace `function` on the arguments' fake tensors and copy the ATen nodes before `node`.

        args: nodes, ints or None. Equal calls on equal shapes are traced once: 32 layers cost one trace.
        """
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        given = [i for i, a in enumerate(args) if isinstance(a, Node)]
        described = tuple(_description(v) for v in values)
        symbolic = "Sym" in repr(described) or any(isinstance(s, torch.SymInt) for v in values for s in _sizes(v))
        traced = None if symbolic else self.traced.get((key, described))
        if traced is None:

            def call(*tensors: Any) -> Any:
                full = list(values)
                for i, tensor in zip(given, tensors, strict=True):
                    full[i] = tensor
                return function(*full)

            fakes = [values[i] for i in given]
            mode = next(v.fake_mode for v in fakes if isinstance(v, torch._subclasses.FakeTensor))
            with mode:
                traced = make_fx(
                    call, select_decomp_table(), tracing_mode="symbolic" if symbolic else "real", _allow_non_fake_inputs=True
                )(*fakes)
            traced.graph.eliminate_dead_code()
            self.traced[key, described] = traced
        return self._copy(node, traced.graph, [args[i] for i in given])

    def _copy(self, node: Node, body: Graph, inputs: Sequence[Node]) -> list[Node]:
        served = {k: node.meta[k] for k in SERVED_META if k in node.meta}
        # Under Inductor's fallback_by_default (mode "lite") the model runs as ATen kernels; ours are compiled all the same.
        served["custom"] = {**(served.get("custom") or {}), "compile_with_inductor": "fp4"}
        env = dict(zip((n for n in body.nodes if n.op == "placeholder"), inputs, strict=True))
        with self.graph.inserting_before(node):
            for inner in body.nodes:
                if inner.op == "get_attr":
                    raise AssertionError(f"the oracle made a tensor constant, which no cache can key: {inner.format_node()}")
                if inner.op == "call_function":
                    env[inner] = self.graph.node_copy(inner, env.__getitem__)
                    env[inner].meta = {"val": inner.meta["val"], **served}
        (results,) = next(n for n in reversed(body.nodes) if n.op == "output").args
        return [env[r] for r in (results if isinstance(results, list | tuple) else [results])]  # type: ignore[index, union-attr]


def _sizes(value: Any) -> tuple[Any, ...]:
    return (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)


def _description(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return value
