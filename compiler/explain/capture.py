"""Capture a model's forward and backward graphs as the backend makes them, on fake tensors: nothing runs, nothing is allocated.

The model is copied with its parameters and buffers replaced by fake CPU tensors of the same shape, stride and dtype, so a
model under ``torch.device("meta")``, on a GPU, or larger than the memory is captured alike. Dynamo, AOTAutograd, the passes and
the partitioner are the real ones; only code generation is left out.
"""

from __future__ import annotations

import copy
import inspect
import re
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from fp4.compiler import backend
from fp4.compiler.joint_pass import JointPass
from fp4.compiler.pipeline import Context
from fp4.compiler.report import GraphReport
from fp4.compiler.sites import Input

# Stages by what they show, beside the passes' own names.
TAGGED, REWRITTEN, FORWARD, BACKWARD, LOWERED = "tagged", "rewritten", "forward", "backward", "lowered"


class ExplainError(ValueError):
    """What was asked of explain cannot be had; the message says what to write instead."""


@dataclass
class Captured:
    """One compiled graph.

    stages: the joint (or inference) graph as captured and after each pass, in order, by pass name.
    forward, backward: the graphs after partitioning, before lowering; an inference graph is `forward` alone.
    """

    context: Context
    stages: dict[str, Graph] = field(default_factory=dict)
    forward: GraphModule | None = None
    backward: GraphModule | None = None
    report: GraphReport | None = None

    @property
    def rewritten(self) -> Graph:
        """The joint graph after the last pass."""
        return self.stages[next(reversed(self.stages))]


@dataclass(frozen=True, eq=False)
class _Recording(JointPass):
    """The joint pass, keeping the context and a copy of the graph after each pass."""

    made: list[Captured] = field(default_factory=list)

    def context(self) -> Context:
        context = super().context()
        self.made.append(Captured(context))
        return context

    def keep(self, stage: str, graph: Graph) -> None:
        self.made[-1].stages[stage] = copy.deepcopy(graph)

    def received(self, report: GraphReport) -> None:
        self.made[-1].report = report


def capture(
    model: nn.Module,
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    options: backend.Options,
    autocast: torch.dtype | None = None,
) -> list[Captured]:
    """The graphs that ``torch.compile(model, backend="fp4")(*inputs, **named)`` and its backward would be.

    Under ``torch.no_grad()``: the inference graph. autocast: of the matrix products; None: the ambient autocast's, if any.
    Raises ExplainError for a model that cannot be traced without its values, or in which no matrix product was found.
    """
    if not isinstance(model, nn.Module):
        raise ExplainError(f"fp4.explain takes a torch.nn.Module, got {type(model).__name__}: wrap a function in a module")
    model = getattr(model, "_orig_mod", model)
    policy = options.resolved()
    mode = FakeTensorMode()
    graphs: list[Captured] = []

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        made: list[Captured] = []
        joint = _Recording(policy, _inputs(gm), options.save_weights, False, _nothing, lowering=options.lowering, made=made)
        # The methods need the object, the object is frozen: set what it calls once it exists.
        object.__setattr__(joint, "observer", joint.keep)
        object.__setattr__(joint, "done", joint.received)
        compiled = backend.compile_with(options, joint, gm, example_inputs, inner_compile=_Inner(made, mode))
        graphs.extend(made)
        return compiled

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        fake, args, kwargs = _fakes(model, inputs, named, mode)
        run = _fresh_frame(fake)
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        stack.enter_context(mode)
        dtype = autocast or ambient_autocast()
        stack.enter_context(torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None))
        try:
            torch.compile(run, backend=compiler, dynamic=False)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ExplainError(
                f"{type(model).__name__} needs the values of a tensor to go on ({error}), and nothing runs here. Give explain "
                "the submodule with the linears, or compile and run the model, and ask fp4.report"
            ) from error
    if not graphs:
        raise ExplainError(f"no matrix product in the graphs of {type(model).__name__}: is this the module with the linears?")
    return graphs


def ambient_autocast() -> torch.dtype | None:
    """The dtype of the autocast that surrounds the caller, of whichever device."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _nothing(_: GraphReport) -> None:
    pass


@dataclass
class _Inner:
    """In place of code generation: keep the graph, and return empty fake results when called."""

    made: list[Captured]
    mode: FakeTensorMode

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        if self.made:
            setattr(self.made[-1], BACKWARD if how.get("is_backward") else FORWARD, gm)

        def run(_: list[Any]) -> list[Any]:
            with self.mode:
                return [_empty(n.meta["val"]) if isinstance(n, Node) else n for n in gm.graph.output_node().args[0]]  # type: ignore[union-attr]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _empty(value: Any) -> Any:
    return _like(value) if isinstance(value, Tensor) else value


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _fakes(
    model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[nn.Module, Any, Any]:
    """Copies of the model and its inputs on fake tensors. A tied parameter stays one."""
    memo: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in memo:
            made = _like(tensor)
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(made, tensor.requires_grad) if parameter else made.requires_grad_(tensor.requires_grad)
            )
        return memo[id(tensor)]

    args, kwargs = _by_name(model, inputs, named)
    with mode:
        for module in model.modules():
            for held in (module._parameters, module._buffers, vars(module)):
                for value in held.values():
                    fake(value)
        args, kwargs = tree_map(fake, (args, kwargs))
        return copy.deepcopy(model, memo), args, kwargs


def _by_name(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the names of forward's parameters, where they have one: a graph input is then known by it."""
    try:
        bound = inspect.signature(model.forward).bind(*inputs, **named)
    except (TypeError, ValueError):  # the model's own call says what is wrong, better than we could
        return tuple(inputs), dict(named)
    kinds = {p.kind for name, p in bound.signature.parameters.items() if name in bound.arguments}
    if kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        return (), dict(bound.arguments)
    return bound.args, bound.kwargs


def _inputs(gm: GraphModule) -> dict[int, Input]:
    """Dynamo's inputs; the model's arguments by their names."""
    found = backend.dynamo_inputs(gm)
    return {i: replace(x, name=re.sub(r"^L\['kwargs'\]\['(\w+)'\]", r"\1", x.name)) for i, x in found.items()}


def _fresh_frame(model: nn.Module) -> Callable[..., Any]:
    """A function that calls the model, of a code object of its own: Dynamo keeps what it compiled beside the code object, and
    the user's own compiled code is neither evicted nor counted against the recompile limit."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = run.__code__.replace(co_name="explained")
    return types.FunctionType(code, run.__globals__, "explained", run.__defaults__, run.__closure__)
