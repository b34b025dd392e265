"""Lower every ``fp4::`` op to the ATen nodes of the oracle (``fp4.runtime.reference``), which Inductor fuses.

Runs after partitioning, on the forward, backward and inference graphs: the partitioner has seen opaque ops and saves their
packed codes. Ops are lowered by regions (``fp4.passes.regions``); equal regions on equal shapes are one subgraph, so that 32
layers are traced and compiled once, not 32 times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp4.compiler.graph import SERVED_META, Builder
from fp4.passes.regions import Region, regions

invoke_subgraph = torch.ops.higher_order.invoke_subgraph
# These stay in the surrounding graph: a product's epilogue fuses with what follows, an amax with what comes before.
INLINE = ("mm", "amax", "top_scale")


@dataclass(frozen=True)
class LowerReference:
    name: ClassVar[str] = "lower_reference"

    def run(self, graph: Graph) -> bool:
        if config.fallback_by_default:
            return False  # mode "lite": the model runs as ATen kernels, and our ops as the oracle they are
        found = regions(graph)
        lowering = _Lowering(graph)
        for region in found:
            lowering.lower(region)
        return bool(found)


class _Lowering:
    """Puts regions in as ATen nodes, or as calls of one subgraph for all equal regions."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.called: dict[Any, tuple[str, GraphModule]] = {}
        self.traced: dict[Any, GraphModule] = {}

    def lower(self, region: Region) -> None:
        outputs = region.outputs()
        dynamic = any(isinstance(s, torch.SymInt) for n in region.inputs() for s in _sizes(n.meta["val"]))
        head: Any = region.head.target
        if head._opname in INLINE or dynamic or config.cpp_wrapper:
            results = self._inline(region, dynamic)
        else:
            results = self._call(region)
        inside = set(region.nodes)
        for old, new in zip(outputs, results, strict=True):
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
        for node in reversed(region.nodes):
            self.graph.erase_node(node)

    def _inline(self, region: Region, dynamic: bool) -> list[Node]:
        inputs, sites = region.inputs(), region.sites()
        key = None if dynamic else (region.key(), tuple(sites))
        body = self.traced.get(key)
        if body is None:

            def run(tensors: Sequence[Any]) -> list[Any]:
                return region.evaluate(dict(zip(inputs, tensors, strict=True)), sites)

            body = _trace(region, inputs, run, dynamic)
            if key is not None:
                self.traced[key] = body
        served = {k: region.head.meta[k] for k in SERVED_META if k in region.head.meta}
        env = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
        with self.graph.inserting_before(region.head):
            for inner in body.graph.nodes:
                if inner.op == "call_function":
                    env[inner] = self.graph.node_copy(inner, env.__getitem__)
                    env[inner].meta = {"val": inner.meta["val"], **served}
        results: Any = body.graph.output_node().args[0]
        return [env[r] for r in results]

    def _call(self, region: Region) -> list[Node]:
        inputs, sites = region.inputs(), region.sites()
        build = Builder(self.graph, region.head)
        device = inputs[0].meta["val"].device
        drawn = [build.full((), site, torch.int64, device) for site in sites]
        if (key := region.key()) not in self.called:
            n = len(inputs)
            body = _trace(
                region,
                [*inputs, *drawn],
                lambda tensors: region.evaluate(dict(zip(inputs, tensors[:n], strict=True)), tensors[n:]),
                dynamic=False,
            )
            view_to_reshape(body)
            root = self.graph.owning_module
            assert root is not None
            name = next(f"fp4_{i}" for i in itertools.count() if not hasattr(root, f"fp4_{i}"))
            root.add_submodule(name, body)
            self.called[key] = name, body
        name, body = self.called[key]
        with self.graph.inserting_before(region.head):
            function = self.graph.get_attr(name)
            call = self.graph.call_function(invoke_subgraph, (function, name, *inputs, *drawn))
        results: Any = body.graph.output_node().args[0]
        call.meta = {**build.meta, "val": tuple(r.meta["val"] for r in results)}
        return list(build.outputs(call))


def _trace(region: Region, inputs: Sequence[Node], function: Callable[[Sequence[Any]], Any], dynamic: bool) -> GraphModule:
    """The ATen graph of `function` on the inputs' fake tensors."""
    fakes = [n.meta["val"] for n in inputs]
    mode = next(v.fake_mode for v in fakes if isinstance(v, torch._subclasses.FakeTensor))
    with mode:
        body = make_fx(
            lambda *tensors: function(tensors), select_decomp_table(), tracing_mode="symbolic" if dynamic else "real"
        )(*fakes)
    body.graph.eliminate_dead_code()
    if constants := body.graph.find_nodes(op="get_attr"):
        raise AssertionError(f"the oracle made a tensor constant, which no cache can key: {constants[0].format_node()}")
    return body


def _sizes(value: Any) -> tuple[Any, ...]:
    return (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
