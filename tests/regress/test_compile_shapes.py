"""Shapes that broke elsewhere: ao#571 and #3233 (K = 40, N = 25), TE#2346 (M = 1, 15, 127), TE#3348 (no rows), ModelOpt
(strided inputs), Quartet-II K6 and fouroversix (batches). Equal to the eager oracle, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fp4
from tests.graphs import Captured, capturing, compiled, interpreted, step, unequal
from tests.oracle_recipes import OracleModel

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


class One(nn.Module):
    def __init__(self, k: int = 64, n: int = 64, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f = nn.Linear(k, n, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def against_the_oracle(model: nn.Module, x: Tensor, autocast: bool = False, dynamic: bool | None = None) -> dict[str, Tensor]:
    oracle = OracleModel(copy.deepcopy(model), ["f"], ())
    found = interpreted(model, x, ALL, autocast, dynamic=dynamic)
    assert unequal(found, step(oracle.model, oracle, x, autocast)) == []
    return found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("k", "n"), [(40, 64), (48, 64), (64, 25), (33, 31), (17, 100), (130, 18)])
def test_features_that_are_no_multiple(k: int, n: int, autocast: bool) -> None:
    against_the_oracle(One(k, n), torch.randn(32, k), autocast)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("m", [1, 2, 15, 17, 127, 129])
def test_tokens_that_are_no_multiple(m: int, autocast: bool) -> None:
    against_the_oracle(One(64, 48), torch.randn(m, 64), autocast)


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64), (2, 0, 64)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    """No rows out, a zero gradient of the weight."""
    model = One()
    found = interpreted(model, torch.randn(shape), ALL)
    assert found["output"].shape == shape
    assert found["input"].shape == shape
    assert torch.equal(found["f.weight"], torch.zeros(64, 64))
    assert torch.equal(found["f.bias"], torch.zeros(64))


@pytest.mark.parametrize("shape", [(64,), (24, 64), (2, 12, 64), (2, 3, 4, 64), (24, 1, 64), (1, 1, 24, 64)])
def test_every_batch_shape_is_the_flattened_call(shape: tuple[int, ...]) -> None:
    model, x = One(), torch.randn(shape)
    found = against_the_oracle(model, x)
    flat = interpreted(model, x.reshape(-1, 64), ALL)
    assert torch.equal(found["f.weight"].ne(0), flat["f.weight"].ne(0))
    assert torch.equal(found["output"].reshape(-1, 64), flat["output"])


class Strided(One):
    def __init__(self, how: str) -> None:
        super().__init__(32, 64)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        taken = {
            "columns": x[:, ::2],
            "rows": x[::2, :32],
            "transposed": x[:, :32].t().contiguous().t(),
            "expanded": x[:1, :32].expand(64, 32),
        }
        return self.f(taken[self.how])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("how", ["columns", "rows", "transposed", "expanded"])
def test_a_view_is_its_clone(how: str, autocast: bool) -> None:
    against_the_oracle(Strided(how), torch.randn(64, 64), autocast)


def test_strided_arguments_of_the_graph() -> None:
    """The input itself strided, not a view taken inside."""
    model, x = One(32, 64), torch.randn(64, 64)
    for view in (x[:, ::2], x[:, :32], x[:32].t()):
        given = view if view.shape[1] == 32 else view.t()
        assert unequal(interpreted(model, given, ALL), interpreted(model, given.contiguous(), ALL)) == []


class Transposed(nn.Module):
    """The weight stored (K, N): x @ W, and W^T in F.linear."""

    def __init__(self, linear: One, style: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.f.weight.detach().t().contiguous())
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "matmul":
            return x @ self.weight
        if self.style == "einsum":
            return torch.einsum("bsd,de->bse", x, self.weight)
        return nn.functional.linear(x, self.weight.t())


@pytest.mark.parametrize("style", ["matmul", "einsum", "linear"])
def test_a_transposed_weight_is_the_same_linear(style: str) -> None:
    one, x = One(48, 64, bias=False), torch.randn(2, 16, 48)
    linear = interpreted(one, x, ALL)
    found = interpreted(Transposed(one, style), x, ALL)
    assert torch.equal(found["output"], linear["output"])
    assert torch.equal(found["input"], linear["input"])


@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize("shape", [(3, 15, 64), (2, 3, 15, 64)])
def test_a_frozen_weight_and_a_strided_batch(shape: tuple[int, ...], input_grad: bool) -> None:
    """``F.linear`` makes a batched product of these, with the weight repeated: found by fuzzing."""

    class Every(One):
        def forward(self, x: Tensor) -> Tensor:
            return self.f(x[..., ::2])

    model = Every(32, 48, bias=False)
    model.f.requires_grad_(False)
    x = torch.randn(shape, requires_grad=input_grad)
    oracle = OracleModel(copy.deepcopy(model), ["f"], ())
    torch._dynamo.reset()
    with capturing(Captured()):
        ours = compiled(model, policy=ALL)(x)
        assert torch.equal(ours, oracle(x))
        if input_grad:
            torch.manual_seed(3)
            (first,) = torch.autograd.grad(compiled(model, policy=ALL)(x).sum(), x)
            torch.manual_seed(3)
            (second,) = torch.autograd.grad(oracle(x).sum(), x)
            assert torch.equal(first, second)
    assert fp4.report(model).graphs[0].unknown == {}
