"""lower_fp8: products of FP8 operands with FP32 block scales, per GEMM, with the same results; what cuBLAS has not is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph

import fp4
from fp4.compiler.lowering import LoweringOptions
from fp4.compiler.policy import GemmPrecision, LinearPrecision, Operand, Policy
from fp4.kernels import fp8_blocks
from fp4.passes import lower_fp8, lowering
from fp4.passes.lower_fp8 import LowerFp8
from fp4.passes.lower_reference import LowerReference
from fp4.runtime import counters
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer
from tests.graphs import MLP, equal, evaluate, gaussians, ops, rewritten
from tests.passes.test_lower_blackwell import compiled_step, graphs, lowered, policy, recipe

PASSES = [p for p in lowering(LoweringOptions(target="sm_90", exact=False)) if not isinstance(p, LowerReference)]
ROW, SQUARE = FP8(), FP8(block=(128, 128))


def products(graph: Graph) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=torch.ops.fp4.fp8_block_mm.default))


def same(graph: Graph, new: Graph) -> None:
    """Both graphs compute the same, in every bit, from any codes that forward saved."""
    generator = torch.Generator().manual_seed(5)
    inputs = [
        torch.randint(0, 120, x.shape, generator=generator, dtype=torch.uint8) if x.dtype == torch.uint8 else x
        for x in gaussians(graph)
    ]
    assert equal(evaluate(graph, inputs), evaluate(new, inputs))


class Wide(nn.Module):
    """Several blocks of 128 in every dimension, and parts of one."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(64, 300, bias=bias)
        self.down = nn.Linear(300, 140, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("rows", [64, 150])
@pytest.mark.parametrize("save_weights", [False, True])
def test_the_same_bits(rows: int, save_weights: bool) -> None:
    """Every GEMM is a product of codes, no operand is decoded; saved codes of W are transposed for dgrad."""
    forward, backward = graphs(recipe("fp8"), rows, model=Wide(), save_weights=save_weights)
    for graph, count in ((forward, 2), (backward, 4)):
        new = lowered(graph, PASSES)
        assert len(products(new)) == ops(graph)["fp4::mm"] == count
        assert ops(new)["fp4::mm"] == ops(new)["fp4::dequantize"] == ops(new)["fp4::fake_quantize"] == 0
        same(graph, new)
    assert (ops(new)["fp4::transpose_codes"] > 0) == save_weights


def test_the_blocks_of_each_gemm() -> None:
    """fprop and dgrad are 1x128 by 128x128, wgrad 1x128 by 1x128; K is not padded, the codes are."""
    forward, backward = (lowered(g, PASSES) for g in graphs(recipe("fp8"), rows=150, model=nn.Linear(64, 300, bias=False)))
    found = {}
    for node in products(forward) + products(backward):
        role = node.meta["fp4"].split()[-1]
        found[role] = (*node.args[4:7], tuple(node.args[0].meta["val"].shape), tuple(node.args[2].meta["val"].shape))
    assert found == {
        "fprop": (str(ROW), str(SQUARE), 64, (150, 128), (300, 128)),
        "dgrad": (str(ROW), str(SQUARE), 300, (150, 384), (64, 384)),
        "wgrad": (str(ROW), str(ROW), 150, (300, 256), (64, 256)),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_and_output_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(40, 64, requires_grad=True)
    got = rewritten(Wide(bias=True), x, policy=recipe("fp8"), autocast=dtype == torch.bfloat16)
    for graph in (got.forward[0].graph, got.backward[0].graph):
        new = lowered(graph, PASSES)
        assert all(node.meta["val"].dtype == dtype for node in products(new))
        same(graph, new)
    forward = products(lowered(got.forward[0].graph, PASSES))
    assert [node.args[7] is not None for node in forward] == [True, True]


def test_dynamic_shapes() -> None:
    for graph in graphs(recipe("fp8"), rows=48, dynamic=True):
        assert len(products(lowered(graph, PASSES))) == ops(graph)["fp4::mm"]


@pytest.mark.parametrize("pair", [(SQUARE, ROW), (ROW, ROW)], ids=str)
def test_other_blocks(pair: tuple[Quantizer, Quantizer]) -> None:
    for graph in graphs(policy(*pair), rows=40):
        new = lowered(graph, PASSES)
        assert len(products(new)) == ops(graph)["fp4::mm"]
        same(graph, new)


@pytest.mark.parametrize(
    ("first", "second", "target"),
    [
        (FP8(format="e5m2"), SQUARE, "sm_90"),
        (FP8(format="e5m2"), FP8(format="e5m2"), "sm_90"),
        (FP8(block=(1, 32)), FP8(block=(1, 32)), "sm_90"),
        (SQUARE, SQUARE, "sm_90"),
        (ROW, None, "sm_90"),
        (ROW, MXFP8(), "sm_90"),
        (ROW, MXFP4(), "sm_90"),
        (NVFP4(), ROW, "sm_90"),
        (ROW, SQUARE, "sm_89"),
        (ROW, SQUARE, "sm_100a"),
        (ROW, SQUARE, None),
    ],
    ids=str,
)
def test_what_the_library_does_not_have_is_left_alone(first: Quantizer, second: Quantizer | None, target: str | None) -> None:
    for graph in graphs(policy(first, second)):
        copied = copy.deepcopy(graph)
        assert not LowerFp8(target).run(copied)
        assert ops(copied) == ops(graph)


def test_exact_is_the_default() -> None:
    passes = [p for p in lowering(LoweringOptions(target="sm_90")) if not isinstance(p, LowerReference)]
    assert not any(products(lowered(graph, passes)) for graph in graphs(recipe("fp8")))


def test_an_old_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a named target it is the device's torch that is asked."""
    device = torch.device("cuda")
    monkeypatch.setattr(lower_fp8, "_capability", lambda device, name: 90)
    for version, found in (("12.8", False), ("12.9", True)):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert lower_fp8.has_blocks(device, None) == fp8_blocks.new_enough() == found
        assert lower_fp8.has_blocks(device, "sm_90")


def test_the_report_says_so() -> None:
    counters.clear()
    counters.counter(lower_fp8.counter("a fprop", 0), torch.device("cpu")).add_(1)  # of an earlier MXFP4 model
    precision = LinearPrecision(
        GemmPrecision(Operand(ROW), Operand(SQUARE)),
        GemmPrecision(Operand(FP8(format="e5m2")), Operand(SQUARE)),
        GemmPrecision(Operand(MXFP4()), Operand(MXFP4())),
    )
    x = torch.randn(32, 64, requires_grad=True)
    for target, exact, formats in (
        ("sm_90", False, [["e4m3", "e4m3"], [], ["e5m2", "e4m3"]]),
        ("sm_89", False, [[], [], ["e5m2", "e4m3"]]),
        ("sm_90", True, [[], [], []]),
    ):
        got = rewritten(MLP(), x, policy=Policy("test", precision), target=target, exact=exact)
        gemms = got.report.linears[0].gemms
        assert [g.fp8 for g in gemms] == formats
        assert gemms[0].outside("a") == {}
        lowering_passes = [
            p for p in lowering(LoweringOptions(target=target, exact=exact)) if not isinstance(p, LowerReference)
        ]
        graphs = (got.forward[0].graph, got.backward[0].graph)
        block, mx = (sum(ops(lowered(g, lowering_passes))[f"fp4::{op}"] for g in graphs) for op in ("fp8_block_mm", "fp8_mm"))
        assert (block, mx) == (3 * (["e4m3", "e4m3"] in formats), 3 * (["e5m2", "e4m3"] in formats))
        assert ("multiplied in FP8, e4m3 x e4m3" in str(fp4.report(got.model))) == (block > 0)


@pytest.mark.slow
def test_a_compiled_step() -> None:
    """Through Inductor on a CPU, where the op is the oracle's GEMM."""
    plain, fp8 = compiled_step("fp8"), compiled_step("fp8", target="sm_90", exact=False)
    for name, value in plain.items():
        assert torch.equal(value, fp8[name]), name
