"""Layers that are not an ``nn.Linear``: stacks of experts, multi-head attention, LSTM, tied and fused weights, convolutions.

Equal to the eager oracle, bit for bit, or reported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp4
from tests.graphs import Captured, capturing, compiled, rewritten
from tests.models.test_models import USUAL, compare, everything
from tests.oracle_recipes import RECIPES, _Linear

SIZES = ([0, 1, 31, 33], [65, 0, 0, 0], [16, 16, 17, 16], [0, 0, 0, 65], [1, 1, 1, 62])


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


class Experts(nn.Module):
    """Two stacks that read one activation, and one after them; weights (E, N, K) or, `stored_kn`, (E, K, N)."""

    def __init__(self, stored_kn: bool = False, experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stored_kn = stored_kn
        shapes = [(48, 40), (48, 40), (40, 48)]
        shapes = [s[::-1] for s in shapes] if stored_kn else shapes
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(experts, *s) / 6) for s in shapes)

    def product(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, w if self.stored_kn else w.transpose(-2, -1), offs)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        hidden = F.silu(self.product(x, self.gate, offs)) * self.product(x, self.up, offs)
        return self.product(hidden, self.down, offs)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_of_any_group_size(sizes: list[int]) -> None:
    x = torch.randn(65, 40, requires_grad=True).to(torch.bfloat16)
    report = compare(Experts().to(torch.bfloat16), {"x": x, "offs": ends(sizes)})
    assert [linear.name for linear in report.graphs[0].linears] == ["gate", "up", "down"]
    assert all(g.quantized for linear in report.graphs[0].linears for g in linear.gemms if g.role != "dgrad")


@pytest.mark.parametrize("recipe", ["quartet2", "quartet", "tetrajet2", "mxfp4_rht", "fp8"])
def test_experts_of_every_kind_of_recipe(recipe: str) -> None:
    """Forward copies, clip masks, inverse rotations, fresh signs, outer scales."""
    x = torch.randn(65, 40, requires_grad=True).to(torch.bfloat16)
    compare(Experts().to(torch.bfloat16), {"x": x, "offs": ends([0, 1, 31, 33])}, recipe)


def test_experts_stored_the_other_way() -> None:
    x = torch.randn(65, 40).to(torch.bfloat16)
    compare(Experts(stored_kn=True).to(torch.bfloat16), {"x": x, "offs": ends([0, 1, 31, 33])})


def test_experts_with_an_input_that_has_a_gradient() -> None:
    """The dgrad of the first stacks too, by the op itself: each expert against a linear of its own."""
    from fp4.runtime.grouped import GroupedPrecision, grouped_mm

    torch.manual_seed(0)
    x, w, dy = torch.randn(65, 40), torch.randn(4, 48, 40), torch.randn(65, 48)
    offs, seed = ends([0, 1, 31, 33]), torch.tensor([5])
    precision = everything().precision
    found = {}
    for role, first, second in (("fprop", x, w), ("dgrad", dy, w), ("wgrad", dy, x)):
        gemm = precision.gemms()[role]
        text = GroupedPrecision(role, str(gemm.first), str(gemm.second), str(gemm.rotation or ""))
        found[role] = grouped_mm(first, second, offs, None, str(text), seed, 0, torch.float32)
    start = 0
    for e, end in enumerate(offs.tolist()):
        xe, we = x[start:end].clone().requires_grad_(), w[e].clone().requires_grad_()
        if end > start:
            y = _Linear.apply(xe, we, None, seed, e, RECIPES["nvfp4"]())
            y.backward(dy[start:end])
            assert torch.equal(found["fprop"][start:end], y)
            assert torch.equal(found["dgrad"][start:end], xe.grad)  # type: ignore[arg-type]
            assert torch.equal(found["wgrad"][e], we.grad)  # type: ignore[arg-type]
        else:
            assert not found["wgrad"][e].any()
        start = end


def test_offsets_that_fall_are_refused() -> None:
    from fp4.runtime.grouped import GroupedPrecision, grouped_mm

    with pytest.raises(ValueError, match=r"offs \[3, 2\] of 4 rows; write ends that rise"):
        grouped_mm(
            torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([3, 2]), None, str(GroupedPrecision("fprop")), None, 0,
            torch.float32,
        )  # fmt: skip


def test_a_kept_stack_of_experts_stays() -> None:
    x = torch.randn(65, 40).to(torch.bfloat16).requires_grad_()
    model = Experts().to(torch.bfloat16)
    offs = ends([0, 1, 31, 33])
    got = rewritten(lambda x: model(x, offs), x, policy=everything().with_rules(fp4.keep("up"), fp4.keep_last(0.4)))
    (graph,) = got.reports
    assert [(linear.name, {g.quantized for g in linear.gemms}) for linear in graph.linears] == [
        ("gate", {True}), ("up", {False}), ("down", {False}),
    ]  # fmt: skip


class Loop(nn.Module):
    """Every expert on every token: a loop Dynamo unrolls, each expert's matrix a part of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 48, 40) / 6)
        self.router = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).relu()
        return torch.stack([F.linear(x, self.w[e]) * share[..., e, None] for e in range(3)]).sum(0)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_loop_over_all_experts(autocast: bool) -> None:
    report = compare(Loop(), {"x": torch.randn(33, 40)}, autocast=autocast, settings=USUAL)
    (graph,) = report.graphs
    assert [linear.name for linear in graph.linears] == ["router", "w[0]", "w[1]", "w[2]"]
    assert graph.unknown == {}


class Attention(nn.Module):
    """q, k and v from one activation, or from three: then the fused weight is split."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mha = nn.MultiheadAttention(32, 2, batch_first=True)
        self.cross = cross

    def forward(self, x: Tensor) -> Tensor:
        other = (x.flip(1), x * 2) if self.cross else (x, x)
        return self.mha(x, *other, need_weights=False)[0]


@pytest.mark.parametrize("cross", [False, True])
def test_multi_head_attention(cross: bool) -> None:
    report = compare(Attention(cross), {"x": torch.randn(2, 17, 32)})
    names = [linear.name for linear in report.graphs[0].linears]
    fused = [f"mha.in_proj_weight[{i}]" for i in range(3)] if cross else ["mha.in_proj_weight"]
    assert names == [*fused, "mha.out_proj"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


@pytest.mark.parametrize("autocast", [False, True])
def test_tied_embedding(autocast: bool) -> None:
    report = compare(Tied(), {"ids": torch.randint(0, 50, (2, 19))}, autocast=autocast, settings=USUAL)
    assert [linear.name for linear in report.graphs[0].linears] == ["body", "head"]


class Convolution(nn.Module):
    def __init__(self, kernel: int = 1, groups: int = 1, rank: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = (nn.Conv1d, nn.Conv2d)[rank - 1](16, 32, kernel, groups=groups)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).flatten(2).mean(2))


@pytest.mark.parametrize("how", [{}, {"kernel": 3}, {"groups": 4}, {"rank": 1}], ids=str)
def test_a_convolution_is_left_alone_and_reported(how: dict[str, Any]) -> None:
    x = torch.randn(3, 16, *((5,) * how.get("rank", 2)))
    report = compare(Convolution(**how), {"x": x})
    (reason,) = report.graphs[0].unknown
    assert "a convolution is left alone" in reason
    assert "(conv.weight)" in reason
    assert "(conv.weight)" in str(report)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(32, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recur(x))

    def recur(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class InOneFunction(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def trained(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    with capturing(Captured()):
        compiled(model, policy=everything())(torch.randn(5, 2, 32)).sum().backward()
    return model


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_reported(kind: type[nn.Module]) -> None:
    """Dynamo traces no RNN: the rest is compiled, and the report names the RNN's weights."""
    report = fp4.report(trained(Recurrent(kind)))
    assert report.uncaptured == ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]
    assert [linear.name for graph in report.graphs for linear in graph.linears] == ["head"]


def test_a_model_dynamo_gives_up_on_says_where_to_look() -> None:
    """The function that calls an RNN itself is left to eager PyTorch as a whole."""
    with pytest.raises(ValueError, match="TORCH_LOGS=graph_breaks"):
        fp4.report(trained(InOneFunction(nn.LSTM)))
