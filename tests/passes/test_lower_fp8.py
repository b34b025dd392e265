"""lower_fp8: products of MXFP4 operands in FP8, per GEMM; what is not exact is left alone, and what is rounded is counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fp4
from fp4.compiler.backend import OptionError, Options
from fp4.compiler.lowering import LoweringOptions
from fp4.compiler.policy import GemmPrecision, LinearPrecision, Operand, Policy
from fp4.passes import lowering
from fp4.passes.lower_fp8 import LowerFp8
from fp4.passes.lower_reference import LowerReference
from fp4.runtime import counters
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer
from tests.graphs import MLP, evaluate, gaussians, ops, rewritten
from tests.passes.test_lower_blackwell import compiled_step, graphs, inputs_of, lowered, policy, recipe

PASSES = [p for p in lowering(LoweringOptions(target="sm_90", exact=False)) if not isinstance(p, LowerReference)]
MX_RECIPES = ("mxfp4_h16", "mxfp4_rht", "quartet")


@pytest.mark.parametrize("name", MX_RECIPES)
@pytest.mark.parametrize("rows", [64, 40])
def test_products_are_those_of_exact_operands(name: str, rows: int) -> None:
    """Bit for bit: the factors are powers of two, and zeros pad a block."""
    for graph in graphs(recipe(name), rows):
        new = lowered(graph, PASSES)
        assert ops(new)["fp4::fp8_mm"] == ops(graph)["fp4::mm"]
        assert ops(new)["fp4::fp8_operand"] == 2 * ops(new)["fp4::fp8_mm"]
        assert ops(new)["fp4::mm"] == ops(new)["fp4::dequantize"] == 0
        inputs = inputs_of(graph, 120)
        counters.clear()
        for a, b in zip(evaluate(graph, inputs), evaluate(new, inputs), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        assert all(outside == 0 for outside, _ in counters.read().values())


def test_operands_are_the_gemms() -> None:
    """Each operand of each GEMM is counted under its own name, and the first is the one of more exponents."""
    seen = {}
    for graph in graphs(recipe("mxfp4_h16")):
        for node in lowered(graph, PASSES).find_nodes(op="call_function", target=torch.ops.fp4.fp8_operand.default):
            seen[node.args[5]] = node.args[4]
    names = [f"{layer} {role} " for layer in ("a", "b", "c") for role in ("fprop", "dgrad", "wgrad")]
    assert seen == {name + str(i): d for name in names for i, d in enumerate((torch.float8_e5m2, torch.float8_e4m3fn))}


@pytest.mark.parametrize("save_weights", [False, True])
def test_square_blocks_are_contiguous_along_the_contraction(save_weights: bool) -> None:
    gemm = GemmPrecision(Operand(MXFP4()), Operand(MXFP4(block=(32, 32))))
    precision = LinearPrecision(gemm, gemm, GemmPrecision(Operand(MXFP4()), Operand(MXFP4())))
    for graph in graphs(Policy("test", precision), rows=40, save_weights=save_weights):
        new = lowered(graph, PASSES)
        assert ops(new)["fp4::mm"] == 0
        inputs = inputs_of(graph, 120)
        for a, b in zip(evaluate(graph, inputs), evaluate(new, inputs), strict=True):
            assert torch.equal(a, b)
    assert (ops(new)["fp4::transpose_codes"] > 0) == save_weights


@pytest.mark.parametrize(
    ("first", "second", "target"),
    [
        (NVFP4(), NVFP4(), "sm_90"),
        (MXFP4(), None, "sm_90"),
        (MXFP8(), MXFP8(), "sm_90"),
        (FP8(), FP8(block=(128, 128)), "sm_89"),
        (MXFP4(), NVFP4(), "sm_90"),
        (MXFP4(), MXFP4(), "sm_80"),
        (MXFP4(), MXFP4(), "sm_100a"),
        (MXFP4(), MXFP4(), None),
    ],
    ids=str,
)
def test_what_is_not_exact_is_left_alone(first: Quantizer, second: Quantizer | None, target: str | None) -> None:
    for graph in graphs(policy(first, second)):
        copied = copy.deepcopy(graph)
        assert not LowerFp8(target).run(copied)
        assert ops(copied) == ops(graph)


def test_exact_is_the_default() -> None:
    for graph in graphs(recipe("mxfp4_h16")):
        new = lowered(graph, [p for p in lowering(LoweringOptions(target="sm_90")) if not isinstance(p, LowerReference)])
        assert ops(new)["fp4::fp8_mm"] == 0
        assert ops(new)["fp4::product"] > 0
    with pytest.raises(OptionError, match="exact"):
        Options.read({"exact": "no"}, None)


def test_bias_and_dynamic_shapes() -> None:
    forward, _ = graphs(recipe("mxfp4_h16"), model=MLP(bias=True))
    new = lowered(forward, PASSES)
    assert [n.args[5] is not None for n in new.find_nodes(op="call_function", target=torch.ops.fp4.fp8_mm.default)] == [
        True
    ] * 3
    for graph in graphs(recipe("mxfp4_h16"), rows=48, dynamic=True):
        assert ops(lowered(graph, PASSES))["fp4::fp8_mm"] > 0


class Wide(nn.Module):
    """Rows of X that differ by 2^40, more than either format reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def test_the_report_counts_what_is_rounded() -> None:
    counters.clear()
    x = torch.ones(64, 64)
    x[32:] *= 2.0**-40
    x.requires_grad_()
    chosen = policy(MXFP4(), MXFP4())
    options: dict[str, Any] = {"policy": chosen, "target": "sm_90", "exact": False}
    got = rewritten(Wide(), x, **options)
    assert [g.fp8 for g in got.report.linears[0].gemms] == [["e5m2", "e4m3"]] * 3
    text = str(fp4.report(got.model))
    assert "multiplied in FP8, e5m2 x e4m3" in text
    assert "rounded" not in text
    forward = lowered(got.forward[0].graph, PASSES)
    inputs = gaussians(got.forward[0].graph)
    inputs = [
        x.detach() if i.shape == x.shape and n.name.startswith("primals_2") else i
        for i, n in zip(inputs, forward.find_nodes(op="placeholder"), strict=True)
    ]
    evaluate(forward, inputs)
    gemm = got.report.linears[0].gemms[0]
    assert gemm.outside("proj") == {"X": (32 * 64, 64 * 64), "W": (0, 64 * 64)}
    assert "rounded, far below the largest: X 2048 of 4.1e+03 elements" in str(fp4.report(got.model)).replace("\n", " ")


@pytest.mark.slow
def test_a_compiled_step() -> None:
    """Through Inductor on a CPU, where the FP8 ops are the oracle's."""
    plain, fp8 = compiled_step("mxfp4_h16"), compiled_step("mxfp4_h16", target="sm_90", exact=False)
    for name, value in plain.items():
        assert torch.equal(value, fp8[name]), name
