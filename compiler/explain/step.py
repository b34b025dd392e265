"""One training step as a function: its joint graph, captured as the compiler sees it, and run op by op.

Dynamo and Inductor's own front end make the graph (the same decompositions, the same hook), so a policy rewrites here what
it rewrites in a compiled model. No code is generated, and running the step changes neither parameters nor buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp4.compiler import pipeline
from fp4.compiler.backend import compile_fx, dynamo_inputs
from fp4.compiler.pipeline import Context, Pass
from fp4.compiler.policy import Policy
from fp4.compiler.sites import Input, input_index
from fp4.passes.recipes import recipe as named_recipe

Loss = Callable[[Any, Any], Tensor]
EXAMPLE = "loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])"


class StepError(ValueError):
    """A training step that cannot be captured or measured as asked; the message says what to write instead."""


def tap(*values: Any) -> None:
    """A node that calls this hands its arguments to the recorder of ``Step.run``; elsewhere it does nothing."""


torch.fx.node.has_side_effect(tap)


def policy_of(recipe: str | Policy, phase: str | None = None) -> Policy:
    """The policy of a recipe's name, or the policy itself; its named phase when one is given."""
    if not isinstance(recipe, str | Policy):
        raise StepError(
            f"recipe={recipe!r} is a {type(recipe).__name__}; write a recipe's name such as 'nvfp4', or an fp4.Policy such as "
            "fp4.recipe('nvfp4').with_rules(...)"
        )
    policy = recipe if isinstance(recipe, Policy) else named_recipe(recipe)
    return policy if phase is None else policy.phase(phase)


def default_loss(model: Any, batch: Any) -> Any:
    """What the model returns for the batch: its ``loss`` (attribute or key) where it has one, else the value itself."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, Mapping):
        return output.get("loss", output)
    return output.loss if hasattr(output, "loss") else output


@dataclass
class Outcome:
    """What one run of a step gave. gradients: by the input's name (a parameter's is its fully qualified name)."""

    loss: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Captured:
    """The joint graph (or, where nothing has a gradient, the inference graph) before the first pass."""

    graph: Graph
    root: nn.Module
    inputs: dict[int, Input]

    def rewritten(self, policy: Policy, after: Mapping[str, Pass] | None = None) -> tuple[Graph, Context]:
        """A copy of the graph after the backend's passes under `policy`, and their context.

        after: a further pass to run after the named one.
        """
        from fp4.passes import JOINT_PASSES

        graph, context = copy.deepcopy(self.graph), Context(policy, self.inputs)
        passes: list[Pass] = []
        for p in JOINT_PASSES:
            passes += [p, *([after[p.name]] if after and p.name in after else [])]
        pipeline.run(passes, graph, context)
        return graph, context


@dataclass(frozen=True, eq=False)
class Step:
    """A captured graph and the values of its inputs: the model's parameters and one batch."""

    captured: Captured
    arguments: tuple[Any, ...]

    def run(self, graph: Graph, seed: int = 0, record: Callable[..., None] | None = None, draw: int | None = None) -> Outcome:
        """Run a rewritten copy of the graph, forward and backward. seed: of the model's random draws, such as dropout's.

        draw: seed of the quantizers' and rotations' draws; `seed` when None. record: called with the arguments of each ``tap``
        node, in execution order.
        """
        device = next((a.device for a in self.arguments if isinstance(a, Tensor)), torch.device("cpu"))
        values = [self._value(n, device) for n in graph.find_nodes(op="placeholder")]
        interpreter = _Interpreter(GraphModule(self.captured.root, graph), seed if draw is None else draw, record)
        with torch.random.fork_rng(), torch.no_grad(), torch.autocast(device.type, enabled=False):
            torch.manual_seed(seed)
            results = torch.utils._pytree.tree_leaves(interpreter.run(*values), is_leaf=lambda x: x is None)
        described = graph.output_node().meta["desc"]
        outcome = Outcome(results[0])
        for what, value in zip(described, results, strict=True):
            of = getattr(what, "grad_of", None)
            if of is not None and value is not None:
                outcome.gradients[self.captured.inputs[of.idx].name] = value
        return outcome

    def _value(self, node: Node, device: torch.device) -> Any:
        index = input_index(node)
        if index is not None:
            value = self.arguments[index]
            return value.detach() if isinstance(value, Tensor) else value
        if "Tangent" in type(node.meta.get("desc")).__name__:
            val = node.meta["val"]
            return torch.ones(val.shape, dtype=val.dtype, device=device)
        raise StepError(
            f"the graph's input {node.name} ({node.meta.get('desc')}) is no plain tensor of the model or the batch: it is "
            "sharded, or shares memory with another that is written in place. Pass the plain module and separate tensors"
        )


def _check_plain(value: Any, name: str) -> None:
    if not isinstance(value, Tensor):
        return
    if value.is_meta or isinstance(value, torch._subclasses.FakeTensor):
        raise StepError(
            f"{name} has no values (device meta, or fake): pass a model and a batch that have. fp4.explain needs none"
        )
    if is_traceable_wrapper_subclass(value):
        raise StepError(
            f"{name} is a {type(value).__name__}, and measuring runs on one device's plain tensors: pass the model before it "
            "is sharded or wrapped"
        )


class _Interpreter(Interpreter):
    def __init__(self, module: GraphModule, seed: int, record: Callable[..., None] | None) -> None:
        super().__init__(module)
        self.seed, self.record = seed, record

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is tap:
            return self.record(*args) if self.record else None
        if target is torch.ops.aten.copy_.default:  # the one write in a functional graph: a buffer's new value, at its end
            return args[0]
        if target is torch.ops.fp4.seed.default:  # no draw from the generator: dropout's are the same under every policy
            return torch.full((1,), self.seed, dtype=torch.int64, device=args[0])
        return super().call_function(target, args, kwargs)


class _Called(Exception):
    """Carries a captured graph and its arguments out of Dynamo, in place of running it."""


class Capture:
    """Captures the step of a model and a loss; one graph serves all batches of one shape.

    model: a module, compiled or not. loss: called as loss(model, batch), returns a scalar; None is ``default_loss``. Autocast
    and the model's training mode are taken as they are at the call.
    """

    def __init__(self, model: Any, loss: Loss | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise StepError(f"model is a {type(model).__name__}; pass the torch.nn.Module that is trained")
        if loss is not None and not callable(loss):
            raise StepError(f"loss={loss!r}; write a function of model and batch, such as {EXAMPLE}")
        model, function = getattr(model, "_orig_mod", model), loss or default_loss

        def call(batch: Any) -> Any:
            return function(model, batch)

        torch._dynamo.reset_code(call.__code__)  # else the graphs of other models count against its recompilations
        self._compiled = torch.compile(call, backend=_backend, fullgraph=True, dynamic=False)

    def __call__(self, batch: Any) -> Step:
        """The step on a batch: a tensor, or a sequence or mapping of the model's arguments. Raises StepError."""
        try:
            with torch.enable_grad():
                value = self._compiled(batch)
        except _Called as called:
            captured, arguments = called.args
            for index, value in enumerate(arguments):
                _check_plain(value, captured.inputs[index].name)
            _check_loss(captured)
            return Step(captured, arguments)
        except torch._dynamo.exc.Unsupported as error:
            raise StepError(
                "forward and loss are not one graph, which measuring needs. Pass the part of the model that is, or a "
                f"loss that is: {EXAMPLE}. Dynamo says: {str(error).strip()}"
            ) from None
        raise StepError(f"the loss, {type(value).__name__}, does not depend on any tensor computed: {_what_loss()}")


def _backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    inputs = dynamo_inputs(gm)
    kept: list[Captured] = []

    class Keep(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            root = graph.owning_module
            kept.append(Captured(copy.deepcopy(graph), root if root is not None else nn.Module(), inputs))

        def uuid(self) -> None:  # compile anew
            return None

    def generate_nothing(*_: Any, **__: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            raise AssertionError("a captured step is run by its interpreter")

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compile_fx(
        gm,
        example_inputs,
        inner_compile=generate_nothing,
        config_patches={"joint_custom_pre_pass": Keep(), "fx_graph_cache": False},
    )

    def called(*arguments: Any) -> Any:
        raise _Called(kept[0], arguments)

    return called


def _check_loss(captured: Captured) -> None:
    described = captured.graph.output_node().meta["desc"]
    nodes = torch.utils._pytree.tree_leaves(captured.graph.output_node().args, is_leaf=lambda x: x is None)
    values = [n.meta["val"] for n, d in zip(nodes, described, strict=True) if type(d).__name__ == "PlainAOTOutput"]
    if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].numel() != 1:
        shapes = ", ".join(str(tuple(getattr(v, "shape", ()))) for v in values)
        raise StepError(f"the loss is not one scalar but has shape {shapes or 'none'}: {_what_loss()}")


def _what_loss() -> str:
    return (
        f"without loss=, model(batch) returns it or has it as .loss (Hugging Face: with labels in the batch). Write {EXAMPLE}"
    )
