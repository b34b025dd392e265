"""FSDP2 on leaf linears, the parent compiled: the linears ran eagerly in BF16 and nobody said so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp4
from tests.graphs import MLP, rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


def hooked(model: nn.Module, *names: str) -> nn.Module:
    """As FSDP2 does to a module it wraps: hooks that Dynamo must not trace."""

    @torch.compiler.disable
    def gather(module: nn.Module, args: tuple[Tensor, ...]) -> None: ...

    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(gather)
        setattr(module, "forward", torch.compiler.disable(module.forward))  # noqa: B010
    return model


def test_some_linears() -> None:
    got = rewritten(hooked(MLP(), "b"), torch.randn(32, 64, requires_grad=True), policy=ALL)
    found = fp4.report(got.model)
    assert found.uncaptured == ["b"]
    assert found.failures == ["b: no compiled graph captured it"]
    assert "no compiled graph captured it" in str(found)


def test_two_linears_of_a_nested_model() -> None:
    model = nn.ModuleDict({"inner": hooked(MLP(), "a", "c"), "outer": nn.Linear(64, 64)})
    rewritten(lambda x: model["outer"](model["inner"](x)), torch.randn(32, 64, requires_grad=True), policy=ALL)
    assert fp4.report(model).uncaptured == ["inner.a", "inner.c"]


def test_none_when_all_are_captured() -> None:
    got = rewritten(MLP(), torch.randn(32, 64, requires_grad=True), policy=ALL)
    assert fp4.report(got.model).uncaptured == []
    assert fp4.report(got.model).failures == []
