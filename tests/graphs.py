"""The graphs the backend makes, without generated code: the real ``compile_fx``, its last step replaced by an interpreter.

What runs is the rewritten graph with its ``fp4::`` ops called eagerly, so a test can look at the joint graph after every
pass, at the partitioned graphs, and at the numbers, in a fraction of a second.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fp4.compiler import backend, pipeline
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.pipeline import Context
from fp4.compiler.policy import Policy
from fp4.compiler.report import REGISTRY, GraphReport
from fp4.compiler.sites import Linear
from fp4.passes import JOINT_PASSES

aten = torch.ops.aten
compile_fx = backend.compile_fx
run_passes = pipeline.run


@dataclass
class Joint:
    """One joint (or inference) graph: a copy of it after each pass, by pass name, from "captured" on; and its context."""

    context: Context
    stages: dict[str, Graph] = field(default_factory=dict)
    final: Graph = field(default_factory=Graph)


@dataclass
class Captured:
    """What a compiled model became. `forward` and `backward` are the partitioned graphs, `inference` the graph without one."""

    model: Any = None
    output: Any = None
    joints: list[Joint] = field(default_factory=list)
    forward: list[GraphModule] = field(default_factory=list)
    backward: list[GraphModule] = field(default_factory=list)
    inference: list[GraphModule] = field(default_factory=list)
    given: list[tuple[Any, ...]] = field(default_factory=list)  # fake inputs of every partitioned graph, in compile order
    reports: list[GraphReport] = field(default_factory=list)

    @property
    def joint(self) -> Joint:
        (only,) = self.joints
        return only

    @property
    def report(self) -> GraphReport:
        (only,) = self.reports
        return only

    @property
    def linears(self) -> list[Linear]:
        return self.joint.context.linears


def capturing(into: Captured) -> Any:
    """A context manager: inside it ``torch.compile(..., backend="fp4")`` records its graphs and generates no code."""

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **how: Any) -> Any:
        kind = "backward" if how.get("is_backward") else "inference" if how.get("is_inference") else "forward"
        getattr(into, kind).append(gm)
        into.given.append(tuple(example_inputs))

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def run_recorded(passes: Any, graph: Graph, context: Context, observer: Any = None) -> None:
        joint = Joint(context)
        into.joints.append(joint)

        def keep(stage: str, graph: Graph) -> None:
            joint.stages[stage] = copy.deepcopy(graph)
            if observer:
                observer(stage, graph)

        run_passes(passes, graph, context, keep)
        joint.final = copy.deepcopy(graph)

    def add(report: GraphReport, parameters: Any) -> None:
        into.reports.append(report)
        type(REGISTRY).add(REGISTRY, report, parameters)

    stack = [
        mock.patch.object(backend, "compile_fx", partial(compile_fx, inner_compile=inner)),
        mock.patch.object(pipeline, "run", run_recorded),
        mock.patch.object(REGISTRY, "add", add),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ]
    return _Together(stack)


class _Together:
    def __init__(self, managers: Sequence[Any]) -> None:
        self.managers = managers

    def __enter__(self) -> None:
        for m in self.managers:
            m.__enter__()

    def __exit__(self, *error: Any) -> None:
        for m in reversed(self.managers):
            m.__exit__(*error)


def compiled(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """``torch.compile`` with the backend and its options."""
    return torch.compile(model, backend="fp4", dynamic=dynamic, options=options)


def rewritten(
    model: Any,
    *inputs: Any,
    policy: Policy | None = None,
    autocast: bool = False,
    dynamic: bool | None = None,
    train: bool = True,
    loss: Callable[[Any], Tensor] = lambda y: y.float().pow(2).sum(),
    seed: int = 0,
    **options: Any,
) -> Captured:
    """Compile `model` (a module or a function) with the backend, run it once, and its backward when `train`.

    policy: the default recipe's when None. options: the backend's own. seed: of the draws, set just before the call.
    """
    torch._dynamo.reset()
    got = Captured()
    given = options if policy is None else {"policy": policy, **options}
    with capturing(got):
        got.model = compiled(model, dynamic, **given)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(train):
            torch.manual_seed(seed)
            got.output = got.model(*inputs)
        if train:
            loss(got.output).backward()
    return got


def ops(graph: Graph) -> Counter[str]:
    """How often the graph calls each op: ``fp4::quantize``, ``aten::mm``."""
    return Counter(n.target.name().removesuffix(".default") for n in _calls(graph))


def _calls(graph: Graph) -> list[Any]:
    return [n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]


def quantizers(graph: Graph) -> Counter[str]:
    """How often the graph quantizes with each specification."""
    return Counter(str(n.args[2]) for n in fp4_nodes(graph, "quantize"))


def outputs(graph: Graph) -> list[Node]:
    """The nodes a graph returns."""
    (values,) = graph.output_node().args
    return [v for v in values if isinstance(v, Node)]  # type: ignore[union-attr]


def saved(got: Captured) -> list[Node]:
    """What the forward graph hands to the backward: its outputs beyond the user's, inputs passed through included."""
    (forward,) = got.forward
    (backward,) = got.backward
    names = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    return [n for n in outputs(forward.graph) if n.name in names]


def nbytes(node: Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


def trios(got: Captured) -> list[tuple[str, tuple[str, ...]]]:
    """Each linear's name and the roles found for it, in execution order."""
    return [(linear.site.name, linear.site.roles) for linear in got.linears]


def step(model: nn.Module, run: Any, x: Tensor, autocast: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Output and all gradients of one step of `run`, whose parameters are `model`'s."""
    leaf = x.detach().clone().requires_grad_(x.is_floating_point())
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = run(leaf)
    tangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype)
    y.backward(tangent)
    found = {"output": y.detach(), "input": leaf.grad} | {n: p.grad for n, p in model.named_parameters()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def unequal(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of the values that differ in a bit, a shape or a type."""
    assert first.keys() == second.keys()
    return [n for n, v in first.items() if v.dtype != second[n].dtype or not torch.equal(v, second[n])]


def interpreted(
    model: nn.Module,
    x: Tensor,
    policy: Policy,
    autocast: bool = False,
    seed: int = 0,
    dynamic: bool | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """``step`` of the model through the backend, the rewritten graphs run op by op."""
    torch._dynamo.reset()
    settings = {"policy": policy, "inductor": {"fallback_random": True}, **options}
    with capturing(Captured()):
        return step(model, compiled(model, dynamic, **settings), x, autocast, seed)


def before(got: Captured, name: str) -> tuple[Graph, Context]:
    """A copy of the captured joint graph, and a context, in which the passes before `name` have run."""
    graph = copy.deepcopy(got.joint.stages["captured"])
    used = got.joint.context
    context = Context(used.policy, used.inputs, used.save_weights)
    for p in JOINT_PASSES:
        if p.name == name:
            return graph, context
        p.run(graph, context)
    raise KeyError(name)


def integers(graph: Graph, largest: int = 2) -> list[Tensor]:
    """A whole number for every element of every input, so that products and sums of them are exact in FP32."""
    shapes = [(n.meta["val"].shape, n.meta["val"].dtype) for n in graph.find_nodes(op="placeholder")]
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(-largest, largest + 1, shape, generator=generator).to(dtype) for shape, dtype in shapes]


def gaussians(graph: Graph) -> list[Tensor]:
    """Gaussian values for every input."""
    generator = torch.Generator().manual_seed(12)
    values = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    return [torch.randn(v.shape, generator=generator).to(v.dtype) for v in values]


def evaluate(graph: Graph, inputs: Sequence[Any], seed: int = 3) -> list[Any]:
    """Run a graph op by op. seed: of the draw at its top."""
    torch.manual_seed(seed)
    root = graph.owning_module if isinstance(graph.owning_module, GraphModule) else nn.Module()
    return tree_leaves(torch.fx.Interpreter(GraphModule(root, graph)).run(*inputs))


def equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Bit for bit, shapes and dtypes included."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))


class MLP(nn.Module):
    """Three linears, all quantized under ``ALL``: (..., 64) -> (..., 64)."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(64, 96, bias=bias)
        self.b = nn.Linear(96, 64, bias=bias)
        self.c = nn.Linear(64, 64, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


def llama(**config: Any) -> Any:
    """A Hugging Face Llama of two layers, hidden 64: 7 linears a layer, and the head."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may look at a hub
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    settings = {**size, **heads, "attn_implementation": "sdpa", "use_cache": False, **config}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings))


def tokens(batch: int = 2, length: int = 32) -> Tensor:
    """(batch, length) int64 token ids for ``llama``."""
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


LLAMA = [
    f"model.layers.{i}.{name}"
    for i in (0, 1)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
] + ["lm_head"]
# The recipe keeps the head, then the last ceil(0.15 * 14) = 3 of the other linears.
LLAMA_KEPT = LLAMA[-4:]
