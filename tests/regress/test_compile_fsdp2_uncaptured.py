"""FSDP2 on leaf linears, the parent compiled: the linears ran eagerly in BF16 and nobody said so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.joint_pass import StrictError
from tests.graphs import MLP, Captured, capturing, compiled, rewritten

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


@pytest.mark.parametrize("names", [("b",), ("a", "c")])
def test_strict_raises_when_the_first_backward_starts(names: tuple[str, ...]) -> None:
    """Forward is over then: a linear that no graph has by then has run in high precision."""
    model = hooked(MLP(), *names)
    torch._dynamo.reset()
    with capturing(Captured()):
        loss = compiled(model, policy=ALL, strict=True)(torch.randn(32, 64, requires_grad=True)).sum()
        with pytest.raises(StrictError, match=r"(?s)no compiled graph captured.*" + r".*".join(names) + r".*graph_breaks"):
            loss.backward()


def test_strict_is_content_when_all_are_captured_also_in_blocks_that_share_a_graph() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(MLP() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x[:, :64] + block(x)[:, :64]
                torch._dynamo.graph_break()
            return x

    model = Stack()
    torch._dynamo.reset()
    with capturing(Captured()):
        compiled(model, policy=ALL, strict=True)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert fp4.report(model).failures == []
    # Names behind a graph break are the whole model's.
    names = {linear.name for graph in fp4.report(model).graphs for linear in graph.linears}
    assert names <= {f"blocks.{i}.{n}" for i in range(3) for n in "abc"}
