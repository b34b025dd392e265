"""Random stacks of linears, and what must hold of each: equal to the eager oracle in every bit, nothing left out in silence."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp4
from fp4.compiler.sites import DECOMPOSED
from tests.graphs import Captured, capturing, compiled
from tests.models.oracle import Calls, oracle

RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in fp4.recipes() if name != "bf16"),
    ("quartet", {"gradient_rounding": "stochastic"}),
    ("mxfp4_h16", {"gemms": ("fprop", "wgrad"), "rest": "mxfp8"}),
    ("mxfp4_h16", {"rotate": "wgrad", "signs": "fresh", "gradient_rounding": "stochastic"}),
    ("all_the_way", {"scale": "e8m0", "tensor_scale": False}),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STRIDES = ("contiguous", "columns", "rows", "transposed", "expanded")
DATA = ("gaussian", "grid", "sparse", "large", "small")
HOW = ("next", "residual", "beside", "again")


@dataclasses.dataclass(frozen=True)
class Case:
    """A stack of linears. rows: the batch's dimensions. layers: (features, bias, how it is used) of each: after the one before;
    added to its input where sizes allow; beside another linear that reads the same activation; or called twice where sizes
    allow. tied: neighbours of equal size share a weight. checkpointed: from which layer on."""

    recipe: int
    dtype: str
    autocast: bool
    rows: tuple[int, ...]
    features: int
    layers: tuple[tuple[int, bool, str], ...]
    strides: str
    data: str
    frozen: tuple[int, ...]
    tied: bool
    checkpointed: int
    input_grad: bool
    seed: int


size = st.one_of(st.integers(0, 300), st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 256, 300]))
row_count = st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 2, 15, 16, 17, 127, 128, 129]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.sampled_from(["flat", "batched", "deep"]))
    if shape == "flat":
        rows: tuple[int, ...] = (draw(row_count),)
    elif shape == "batched":
        rows = (draw(st.integers(0, 5)), draw(st.integers(0, 60)))
    else:
        rows = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 25)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    layers = draw(st.lists(st.tuples(size, st.booleans(), st.sampled_from(HOW)), min_size=1, max_size=4))
    return Case(
        recipe=draw(st.integers(0, len(RECIPES) - 1)),
        dtype=dtype,
        autocast=dtype == "float32" and draw(st.booleans()),
        rows=rows,
        features=draw(size),
        layers=tuple(layers),
        strides=draw(st.sampled_from(STRIDES)),
        data=draw(st.sampled_from(DATA)),
        frozen=tuple(draw(st.lists(st.integers(0, 3), max_size=2, unique=True))),
        tied=draw(st.booleans()),
        checkpointed=draw(st.integers(0, 5)),
        input_grad=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


class Stack(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        dtype, features = DTYPES[case.dtype], case.features
        self.how = [how for _, _, how in case.layers]
        self.checkpointed = case.checkpointed
        self.first, self.second = nn.ModuleList(), nn.ModuleList()
        for n, bias, how in case.layers:
            self.first.append(nn.Linear(features, n, bias=bias, dtype=dtype))
            self.second.append(nn.Linear(features, n, bias=not bias, dtype=dtype) if how == "beside" else nn.Identity())
            features = n
        if case.tied:
            for a, b in zip(self.first, list(self.first)[1:], strict=False):
                if a.weight.shape == b.weight.shape:
                    b.weight = a.weight
        for i in case.frozen:
            if i < len(self.first):
                self.first[i].requires_grad_(False)

    def layer(self, i: int, x: Tensor) -> Tensor:
        first, how = self.first[i], self.how[i]
        y = first(x).relu()
        if how == "beside":
            return y + self.second[i](x)
        if how == "residual" and y.shape == x.shape:
            return y + x
        if how == "again" and y.shape == x.shape:
            return first(y)
        return y

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.first)):
            x = checkpoint(self.layer, i, x, use_reentrant=False) if i >= self.checkpointed else self.layer(i, x)
        return x


def inputs(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (*case.rows, case.features)
    if case.strides == "columns":
        shape = (*case.rows, 2 * case.features)
    elif case.strides == "rows":
        shape = (*case.rows[:-1], 2 * case.rows[-1], case.features)
    elif case.strides == "transposed":
        shape = (*case.rows[:-1], case.features, case.rows[-1])
    elif case.strides == "expanded":
        shape = (*case.rows[:-1], 1, case.features)
    x = torch.randn(shape, generator=generator)
    if case.data == "grid":
        x = (4 * x).round() / 4
    elif case.data == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.1)
    x = x * {"large": 1e3, "small": 1e-4}.get(case.data, 1.0)
    x = x.to(DTYPES[case.dtype])
    if case.strides == "columns":
        return x[..., ::2]
    if case.strides == "rows":
        return x[..., ::2, :]
    if case.strides == "transposed":
        return x.transpose(-1, -2)
    return x.expand(*case.rows, case.features) if case.strides == "expanded" else x


def step(model: nn.Module, run: Any, case: Case, calls: Calls | None = None) -> dict[str, Tensor]:
    """Output and gradients of one step, none where nothing needs a gradient."""
    x = inputs(case).detach().requires_grad_(case.input_grad)
    torch.manual_seed(case.seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        if calls is not None:
            calls.start()
        y = run(x)
    if y.requires_grad:
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(case.seed)).to(y.dtype))
    found = {"output": y.detach(), "input": x.grad} | {n: p.grad for n, p in model.named_parameters()}
    return {n: v.clone() for n, v in found.items() if v is not None}


def check(case: Case) -> dict[str, int]:
    """Assert what must hold; returns how many linears and GEMMs the graph had, and how many values were compared."""
    torch._dynamo.reset()
    name, flags = RECIPES[case.recipe]
    model = Stack(case)
    other = copy.deepcopy(model)
    other.checkpointed = len(case.layers)
    policy = fp4.recipe(name, keep_heads=False, high_precision_tail=0.0, **flags)
    with capturing(Captured()):
        ours = step(model, compiled(model, policy=policy, inductor={"fallback_random": True}), case)
    reports = fp4.report(model)
    (report,) = reports.graphs
    calls = Calls(len(report.linears), name, **flags)
    with oracle(calls):
        theirs = step(other, other, case, calls)
    assert reports.uncaptured == [], reports.uncaptured
    # Of sizes of 1 Inductor makes a multiply and a sum, which are reported; what depends on their rounding is not compared.
    ones = 1 in (*case.rows, case.features, *(n for n, _, _ in case.layers))
    if report.unknown or report.failures:
        assert ones, (report.unknown, report.failures)
        assert all(DECOMPOSED in reason for reason in (*report.unknown, *report.failures) if "tied to no" not in reason)
        return {"linears": len(report.linears), "reported": 1}
    assert len(report.linears) == calls.index, "a linear is in no report"
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        expected = theirs[key]
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), key
        assert torch.equal(value.nan_to_num(7.0), expected.nan_to_num(7.0)), f"{key} differs"
    gemms = sum(g.quantized for linear in report.linears for g in linear.gemms)
    return {"linears": len(report.linears), "gemms": gemms, "values": len(ours)}
