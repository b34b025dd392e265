"""Give a compiled model another phase, recipe or policy in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp4.compiler.backend import OptionError, Options, fp4
from fp4.compiler.policy import Policy


def switch(
    compiled: Callable[..., Any], phase: str | None = None, *, recipe: str | None = None, policy: Policy | None = None
) -> None:
    """Change the precision that a compiled model trains in, in place. Weights, gradients and optimizer state stay.

    compiled: the result of ``torch.compile(model, backend="fp4")``. phase: a phase of its recipe or policy, None for the recipe
    itself. recipe, policy: another one in place of the model's. The next call compiles, once for every phase: going back
    to one that has run compiles nothing.

    Raises OptionError when `compiled` is not compiled with this backend, PolicyError for an unknown phase or recipe.
    """
    wrapper, fullgraph = _compiler(compiled)
    options = dict(wrapper.kwargs.get("options") or {})
    if recipe is not None or policy is not None:
        options.pop("recipe", None)
        options.pop("policy", None)
        options |= {"recipe": recipe} if recipe is not None else {}
        options |= {"policy": policy} if policy is not None else {}
    options.pop("phase", None)
    options |= {"phase": phase} if phase is not None else {}
    mode = wrapper.kwargs.get("mode")
    Options.read(options, mode).resolved()  # an error now, rather than at the next call
    if mode is not None:
        options["mode"] = mode  # torch.compile takes a mode or options
    module: Any = compiled
    new: Any = torch.compile(module._orig_mod, backend="fp4", options=options, dynamic=wrapper.dynamic, fullgraph=fullgraph)
    module.dynamo_ctx = new.dynamo_ctx
    module._initialize()


def _compiler(compiled: Any) -> tuple[Any, bool]:
    """torch.compile's own record of the backend and its arguments, and whether the graph must be whole."""
    if isinstance(compiled, torch._dynamo.OptimizedModule):
        context: Any = compiled.dynamo_ctx
        found = context.callback
        while found is not None:
            if isinstance(found, torch._TorchCompileWrapper) and found.compiler_fn is fp4:
                return found, getattr(context, "fullgraph", False)
            found = getattr(found, "_torchdynamo_orig_backend", getattr(found, "_torchdynamo_orig_callable", None))
    raise OptionError(
        f"fp4.switch takes the result of torch.compile(model, backend='fp4'), not {type(compiled).__name__}. A model compiled "
        "by model.compile(...) is switched by calling that again with other options"
    )
