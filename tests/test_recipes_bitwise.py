"""Every recipe, compiled, equals an eager model written from its paper's table with the oracle, bit for bit, draws included.

The rewritten graph run op by op (fast), by ATen's kernels through Inductor on a Llama (mode "lite"), and as Inductor's own
code (slow). ``tests/oracle_recipes.py`` knows nothing of the passes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.train.loop import deterministic
from tests.compiler.test_bitwise import ATEN, INDUCTOR, gradients, llama, unequal
from tests.graphs import Captured, capturing
from tests.oracle_recipes import OracleModel

# Every recipe, and the flags that change its arithmetic in kind.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in fp4.recipes()),
    ("quartet", {"gradient_rounding": "stochastic"}),
    ("mxfp4_h16", {"gemms": ("fprop", "dgrad"), "rest": "fp8"}),
    ("mxfp4_h16", {"gemms": ("wgrad",), "rest": "mxfp8", "signs": "fresh", "size": 32}),
    ("mxfp4_h16", {"rotate": "wgrad", "signs": "fixed", "gradient_rounding": "stochastic"}),
    ("all_the_way", {"scale": "e8m0", "tensor_scale": False}),
    ("all_the_way", {"scale": "e3m4", "block": 32, "tensor_scale": False}),
]
IDS = [f"{name}{'-' if flags else ''}{'-'.join(map(str, flags.values()))}" for name, flags in CASES]


class MLP(nn.Module):
    def __init__(self, k: int, bias: bool) -> None:
        super().__init__()
        self.a = nn.Linear(k, 48, bias=bias)
        self.b = nn.Linear(48, 56, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def policy(name: str, flags: dict[str, Any], keep: bool = False) -> fp4.Policy:
    if name == "bf16":
        return fp4.recipe(name)
    kept = {} if keep else {"keep_heads": False, "high_precision_tail": 0.0}
    return fp4.recipe(name, **kept, **flags)


def compare(
    model: nn.Module, case: tuple[str, dict[str, Any]], settings: dict[str, Any], autocast: bool, x: Tensor, keep: bool = False
) -> list[str]:
    """Names of the output and gradients in which the compiled model and the eager one differ."""
    torch._dynamo.reset()
    name, flags = case
    copied = copy.deepcopy(model)
    options: Any = {"policy": policy(name, flags, keep), "inductor": settings}
    compiled = torch.compile(model, backend="fp4", options=options)
    with deterministic():
        ours = gradients(model, compiled, autocast, x)
        linears = fp4.report(compiled).graphs[0].linears
        kept = [linear.name for linear in linears if not any(g.quantized for g in linear.gemms)]
        if name == "bf16":
            return unequal(ours, gradients(copied, copied, autocast, x))
        oracle = OracleModel(copied, [linear.name for linear in linears], kept, name, **flags)
        theirs = gradients(oracle.model, oracle, autocast, x)
    return unequal(ours, theirs)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rewritten_graph(case: tuple[str, dict[str, Any]], autocast: bool) -> None:
    """Sizes that are no multiple of a block or a rotation, a bias, three dimensions."""
    torch.manual_seed(0)
    x = torch.randn(3, 17, 40, generator=torch.Generator().manual_seed(5))
    with capturing(Captured()):
        assert compare(MLP(40, bias=True), case, INDUCTOR, autocast, x) == []


@pytest.mark.parametrize("name", ["quartet2", "quartet", "mxfp4_h16", "tetrajet2"])
def test_llama_by_aten(name: str) -> None:
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(2))
    assert compare(llama(2), (name, {}), ATEN, True, tokens, keep=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[: len(fp4.recipes())], ids=IDS[: len(fp4.recipes())])
def test_inductor_s_code(case: tuple[str, dict[str, Any]]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(5))
    assert compare(nn.Sequential(nn.Linear(64, 48, bias=False), nn.ReLU()), case, INDUCTOR, True, x) == []
