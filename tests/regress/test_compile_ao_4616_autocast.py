"""ao#4616: autocast to BF16 over FP32 parameters failed, or gave gradients of the wrong type."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fp4
from tests.graphs import MLP, interpreted, step, unequal
from tests.oracle_recipes import OracleModel

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (2, 32, 64), (2, 3, 7, 64)])
def test_gradients_are_fp32_and_the_oracle_s(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    model, x = MLP(bias), torch.randn(shape)
    oracle = OracleModel(copy.deepcopy(model), "abc", ())
    found = interpreted(model, x, ALL, autocast=True)
    assert unequal(found, step(oracle.model, oracle, x, autocast=True)) == []
    assert found.pop("output").dtype == torch.bfloat16
    assert {v.dtype for v in found.values()} == {torch.float32}


def test_autocast_switched_off_inside() -> None:
    """One linear in BF16, one in FP32: each GEMM has its own type."""

    class Mixed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                return self.b(y.float())

    model = Mixed()
    found = interpreted(model, torch.randn(32, 64), ALL, autocast=True)
    assert found["output"].dtype == torch.float32
    assert [linear.dtype for linear in fp4.report(model).graphs[0].linears] == ["bfloat16", "float32"]


def test_bfloat16_parameters_without_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    oracle = OracleModel(nn.Sequential(copy.deepcopy(model)), ["0"], ())
    x = torch.randn(32, 64).bfloat16()
    found = interpreted(model, x, ALL)
    expected = {n.removeprefix("0."): v for n, v in step(oracle.model, oracle, x).items()}
    assert unequal(found, expected) == []
    assert {v.dtype for v in found.values()} == {torch.bfloat16}
