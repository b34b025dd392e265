"""Which parameters a compiled graph really runs with, known when it is called.

Dynamo compiles a block once and calls the graph for every block like it, so what was seen at compile time is not all that is
covered. And a linear outside every graph is known as such only when a whole forward has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4.compiler.joint_pass import StrictError
from fp4.compiler.report import REGISTRY


def compiled_module() -> nn.Module | None:
    """The module whose compilation is under way: the innermost one on the stack that ``torch.compile`` was called for.

    A frame behind a graph break knows a part of the model as its `self`; names are the whole model's.
    """
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch._dynamo.eval_frame.OptimizedModule):
            return owner._orig_mod
        if isinstance(owner, nn.Module) and getattr(owner, "_compiled_call_impl", None) is not None:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def watched(compiled: Callable[..., Any], positions: Sequence[int], strict_of: nn.Module | None) -> Callable[..., Any]:
    """`compiled`, telling the registry which parameters it is called with.

    positions: of the parameters among its arguments. strict_of: the model all of whose linears must be captured; checked when
    the first backward starts, since forward is over then. Raises StrictError there.
    """
    if not positions or torch._dynamo.config.caching_precompile:  # Dynamo wants to serialize the callable itself
        return compiled
    seen: set[tuple[int, ...]] = set()

    def run(*args: Any) -> Any:
        given = tuple(id(args[i]) for i in positions)
        if given in seen:
            return compiled(*args)
        seen.add(given)
        REGISTRY.called([args[i] for i in positions])
        results = compiled(*args)
        if strict_of is not None:
            _check_at_backward(results, strict_of)
        return results

    return run


def _check_at_backward(results: Any, model: nn.Module) -> None:
    for result in results if isinstance(results, list | tuple) else (results,):
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda gradient: _check(model))
            return


def _check(model: nn.Module) -> None:
    if uncaptured := REGISTRY.find(model).uncaptured:
        raise StrictError(
            "strict=True, and no compiled graph captured these linears, which ran in high precision:\n  "
            + "\n  ".join(uncaptured)
            + "\nTORCH_LOGS=graph_breaks says where Dynamo stopped; compile the block that holds them "
            "(block.compile(backend='fp4', options=...)), or leave out strict"
        )
