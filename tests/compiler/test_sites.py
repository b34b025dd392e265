"""Which products of a model are the fprop, dgrad and wgrad of which linear, one construct a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp4
from fp4.compiler.graph import root
from fp4.compiler.sites import Role, find_gemms
from tests.graphs import Captured, ops, rewritten, trios

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
FULL = ("fprop", "dgrad", "wgrad")
NO_DGRAD = ("fprop", "wgrad")
NO_WGRAD = ("fprop", "dgrad")


class Model(nn.Module):
    """Two linears, a raw (K, N) matrix and an embedding, for a forward function to use as it likes."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=bias)
        self.b = nn.Linear(64, 64, bias=bias)
        self.w = nn.Parameter(torch.randn(64, 96))
        self.e = nn.Embedding(128, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.e.weight
        self.mha = nn.MultiheadAttention(64, 4, batch_first=True, bias=bias)
        self.cell = nn.LSTMCell(64, 32, bias=bias)
        self.code = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def _tied(m: Model, x: Tensor) -> Tensor:
    return m.head(m.e(x.long().abs().flatten() % 128))


def _half_frozen(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x)
    return m.b(y)


def _qk(m: Model, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.a(x), m.b(x), x)


@dataclass
class Case:
    forward: Callable[[Any, Tensor], Tensor]
    expected: list[tuple[str, tuple[str, ...]]]
    shape: tuple[int, ...] = (2, 32, 64)
    bias: bool = False
    input_grad: bool = True
    unknown: int = 0
    autocast: bool = False
    dynamic: bool | None = None


CASES = {
    "2-D": Case(lambda m, x: m.a(x), [("a", FULL)], shape=(64, 64)),
    "2-D, bias": Case(lambda m, x: m.a(x), [("a", FULL)], shape=(64, 64), bias=True),
    "3-D": Case(lambda m, x: m.a(x), [("a", FULL)]),
    "3-D, bias": Case(lambda m, x: m.a(x), [("a", FULL)], bias=True),
    "4-D": Case(lambda m, x: m.a(x), [("a", FULL)], shape=(2, 4, 8, 64)),
    "in a row": Case(lambda m, x: m.b(m.a(x)), [("a", FULL), ("b", FULL)], bias=True),
    "one linear called twice": Case(lambda m, x: m.a(m.a(x)), [("a", FULL), ("a", FULL)]),
    "x @ W": Case(lambda m, x: x @ m.w, [("w", FULL)]),
    "W^T @ x^T": Case(lambda m, x: m.w.t() @ x.t(), [("w", FULL)], shape=(32, 64)),
    "einsum": Case(lambda m, x: torch.einsum("bsd,de->bse", x, m.w), [("w", FULL)]),
    "F.linear, W transposed": Case(lambda m, x: F.linear(x, m.w.t()), [("w", FULL)]),
    "addmm": Case(lambda m, x: torch.addmm(torch.ones(96), x, m.w), [("w", FULL)], shape=(32, 64)),
    "vmap": Case(lambda m, x: torch.vmap(lambda a: a @ m.w)(x), [("w", FULL)]),
    "strided input": Case(lambda m, x: m.a(x[:, ::2]), [("a", FULL)]),
    "transposed input": Case(lambda m, x: m.a(x.transpose(0, 1)), [("a", FULL)]),
    "one activation, two linears": Case(lambda m, x: m.a(x) * m.b(x), [("a", FULL), ("b", FULL)]),
    "attention": Case(_qk, [("a", FULL), ("b", FULL)]),
    "frozen input": Case(lambda m, x: m.a(x), [("a", NO_DGRAD)], input_grad=False),
    "no-grad region": Case(_half_frozen, [("a", ("fprop",)), ("b", NO_DGRAD)]),
    "tied embedding and head": Case(_tied, [("head", FULL)]),
    "two activations": Case(lambda m, x: m.a(x) @ x.transpose(1, 2), [("a", FULL)]),
    "two matrices, no parameter": Case(lambda m, x: m.a(x @ x.t() @ x), [("a", FULL)], shape=(64, 64), unknown=6),
    "multi-head attention": Case(
        lambda m, x: m.mha(x, x, x, need_weights=False)[0], [("mha.in_proj_weight", FULL), ("mha.out_proj", FULL)]
    ),
    "LSTM cell": Case(lambda m, x: m.cell(x)[0], [("cell.weight_hh", NO_DGRAD), ("cell.weight_ih", FULL)], shape=(32, 64)),
    "autocast": Case(lambda m, x: m.b(m.a(x)), [("a", FULL), ("b", FULL)], bias=True, autocast=True),
    "autocast, attention": Case(_qk, [("a", FULL), ("b", FULL)], autocast=True),
    "float64": Case(lambda m, x: F.linear(x.double(), m.a.weight.double()), [], unknown=3),
    "float64 beside float32": Case(lambda m, x: m.b(x) + (x.double() @ m.w[:, :64].double()).float(), [("b", FULL)], unknown=3),
    "dynamic": Case(lambda m, x: m.b(m.a(x).relu()), [("a", FULL), ("b", FULL)], bias=True, dynamic=True),
    "checkpoint": Case(
        lambda m, x: checkpoint(lambda y: m.b(m.a(y).relu()), x, use_reentrant=False), [("a", FULL), ("b", FULL)]
    ),
    "checkpoint, bias, autocast": Case(
        lambda m, x: m.b(checkpoint(lambda y: m.a(y).relu(), x, use_reentrant=False)),
        [("a", FULL), ("b", FULL)],
        bias=True,
        autocast=True,
    ),
}


@cache
def capture(name: str) -> Captured:
    case = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(case.shape, requires_grad=case.input_grad)
    return rewritten(Model(case.forward, case.bias), x, policy=ALL, autocast=case.autocast, dynamic=case.dynamic)


@pytest.mark.parametrize("name", CASES)
def test_construct(name: str) -> None:
    case = CASES[name]
    got = capture(name)
    assert trios(got) == case.expected
    assert len(got.joint.context.unknown) == case.unknown
    # Every product is accounted for: the sites' and the unknown ones are all that the captured graph has, and all sites'
    # have been rewritten.
    sites = [gemm.node for linear in got.linears for gemm in linear.gemms.values()]
    assert len(set(sites)) == len(sites) == ops(got.joint.final)["fp4::mm"]
    assert len(find_gemms(got.joint.stages["canonicalize"])) == len(sites) + case.unknown
    assert sum(ops(got.joint.final)[f"aten::{op}"] for op in ("mm", "addmm")) == case.unknown


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.expected and not case.dynamic])
def test_operands_contract_the_right_dimension(name: str) -> None:
    """fprop contracts K, dgrad N, wgrad M, whichever side the graph has the operands on."""
    got = capture(name)
    for linear in got.linears:
        site = linear.site
        for role, gemm in linear.gemms.items():
            first, second = (gemm.node.args[gemm.slot(i)].meta["val"].shape for i in (0, 1))  # type: ignore[union-attr]
            rows, columns, contracted = {
                Role.FPROP: (site.m, site.n, site.k),
                Role.DGRAD: (site.m, site.k, site.n),
                Role.WGRAD: (site.n, site.k, site.m),
            }[role]
            assert contracted is not None
            padded = -(-contracted // 16) * 16 if role is Role.WGRAD else contracted  # the rotation pads to its size
            assert (tuple(first), tuple(second)) == ((rows, padded), (columns, padded)), (site.name, role)


def test_frozen_weight_has_no_wgrad() -> None:
    model = Model(lambda m, x: m.b(m.a(x)))
    model.a.requires_grad_(False)
    got = rewritten(model, torch.randn(2, 32, 64, requires_grad=True), policy=ALL)
    assert trios(got) == [("a", NO_WGRAD), ("b", FULL)]
    assert [g.reason for g in got.report.linears[0].gemms] == ["", "", "no gradient is asked for"]
    assert model.a.weight.grad is None


def test_frozen_chain_on_a_frozen_input() -> None:
    """Products without a backward share autograd's counter: two in a row have one seq_nr."""
    model = Model(lambda m, x: m.b(m.a(x)) @ m.w)
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)
    got = rewritten(model, torch.randn(2, 32, 64), policy=ALL)
    assert trios(got) == [("a", ("fprop",)), ("b", ("fprop",)), ("w", NO_DGRAD)]
    seq = {linear.site.name: linear.gemms[Role.FPROP].node.meta["seq_nr"] for linear in got.linears}
    assert seq["a"] == seq["b"]


def test_q_k_v_are_told_apart_in_backward() -> None:
    """Three wgrads read one activation: only the dY they share with their dgrad says whose they are."""
    model = Model(lambda m, x: m.a(x) * 2 + m.b(x) * 3 + (x @ m.w[:, :64]) * 5)
    x = torch.randn(2, 32, 64, requires_grad=True)
    got = rewritten(model, x, policy=ALL)
    nodes = {n.name: n for n in got.joint.stages["assign_precision"].nodes}
    for linear, factor in zip(got.linears, (2, 3, 5), strict=True):
        for role in (Role.DGRAD, Role.WGRAD):
            gemm = linear.gemms[role]
            operand: Any = nodes[gemm.node.name].args[gemm.slot(0)]
            gradient = root(operand)
            assert (gradient.target, gradient.args[1]) == (torch.ops.aten.mul.Tensor, factor)


def test_no_grad_and_eval_capture_fprop_only() -> None:
    got = rewritten(Model(lambda m, x: m.b(m.a(x))), torch.randn(2, 32, 64), policy=ALL, train=False)
    assert trios(got) == [("a", ("fprop",)), ("b", ("fprop",))]
    assert (got.report.kind, len(got.inference), len(got.forward), len(got.backward)) == ("inference", 1, 0, 0)
    assert {g.reason for linear in got.report.linears for g in linear.gemms if g.role != "fprop"} == {"inference"}


def test_the_site_says_what_a_policy_may_know() -> None:
    got = rewritten(nn.Sequential(nn.Linear(64, 96), nn.Sequential(nn.Linear(96, 32))), torch.randn(2, 24, 64), policy=ALL)
    first, second = (linear.site for linear in got.linears)
    assert (first.name, first.index, first.count, first.depth) == ("0", 0, 2, 0)
    assert (first.m, first.n, first.k, first.dtype, first.module_type) == (48, 96, 64, "float32", "Linear")
    assert (second.name, second.index, second.count, second.depth) == ("1.0", 1, 2, 1)
    assert (second.m, second.n, second.k, second.roles) == (48, 32, 96, FULL)


def test_dynamic_tokens_are_none() -> None:
    got = capture("dynamic")
    assert [(linear.site.m, linear.site.n, linear.site.k) for linear in got.linears] == [(None, 64, 64)] * 2
    assert got.linears[0].site.dtype == "float32"


def test_autocast_products_are_bfloat16() -> None:
    assert {linear.site.dtype for linear in capture("autocast").linears} == {"bfloat16"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("two matrices, no parameter", "a product of two activations"),
        ("float64", "dtype torch.float64"),
        ("float64 beside float32", "a backward product tied to no forward linear"),
    ],
)
def test_unknown_products_say_why(name: str, reason: str) -> None:
    assert any(reason in text for text in capture(name).report.unknown)


def test_a_product_inductor_writes_as_an_outer_product_is_a_failure() -> None:
    """One token and few features: the wgrad is multiply and sum when the passes run. The report says so, strict refuses."""
    got = rewritten(nn.Linear(20, 12), torch.randn(1, 20, requires_grad=True), policy=ALL)
    assert [roles for _, roles in trios(got)] == [NO_WGRAD]
    (failure,) = got.report.failures
    assert "wgrad: one token: Inductor turned the product into an outer product" in failure
    with pytest.raises(Exception, match="strict=True"):
        rewritten(nn.Linear(20, 12), torch.randn(1, 20, requires_grad=True), policy=ALL, strict=True)
