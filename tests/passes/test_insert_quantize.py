"""insert_quantize: amax, quantize, dequantize before each operand the policy quantizes, the tensor scales as alpha."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.passes.insert_quantize import InsertQuantize
from tests.graphs import MLP, before, equal, evaluate, gaussians, integers, ops, quantizers, rewritten

NONE = fp4.BF16
NVFP4 = fp4.NVFP4()
MXFP4 = fp4.MXFP4()
SR = fp4.NVFP4(rounding="stochastic")


def policy(fprop: fp4.GemmPrecision = NONE, dgrad: fp4.GemmPrecision = NONE, wgrad: fp4.GemmPrecision = NONE) -> fp4.Policy:
    return fp4.Policy("test", fp4.LinearPrecision(fprop, dgrad, wgrad))


def gemm(first: fp4.Quantizer | None, second: fp4.Quantizer | None) -> fp4.GemmPrecision:
    return fp4.GemmPrecision(first, second)


def x(rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64, requires_grad=True)


@pytest.mark.parametrize(
    ("first", "second", "factors"), [(NVFP4, NVFP4, 2), (NVFP4, None, 1), (None, NVFP4, 1), (MXFP4, MXFP4, 0)]
)
@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_the_operands_that_ask(role: str, first: fp4.Quantizer | None, second: fp4.Quantizer | None, factors: int) -> None:
    got = rewritten(nn.Linear(64, 96, bias=False), x(), policy=policy(**{role: gemm(first, second)}))
    graph, context = before(got, "insert_quantize")
    assert InsertQuantize().run(graph, context)
    (site,) = context.linears[0].gemms.values() if len(context.linears[0].gemms) == 1 else [context.linears[0].gemms[role]]  # type: ignore[index]
    mm = site.node
    decoded = [mm.args[site.slot(i)].target is torch.ops.fp4.dequantize.default for i in (0, 1)]  # type: ignore[union-attr]
    assert decoded == [first is not None, second is not None]
    alpha = mm.args[2]
    scales = 0 if alpha is None else 2 if alpha.target is torch.ops.aten.mul.Tensor else 1  # type: ignore[union-attr]
    assert scales == factors
    assert len(list(fp4_nodes(graph, "quantize"))) == sum(decoded)
    # An amax where the arithmetic reads one.
    assert ops(graph)["fp4::amax"] == factors


def test_nothing_quantized_nothing_changed() -> None:
    graph, context = before(rewritten(MLP(), x(), policy=policy()), "insert_quantize")
    text = str(graph)
    assert not InsertQuantize().run(graph, context)
    assert str(graph) == text


def test_every_random_rounding_has_its_own_site_and_one_seed() -> None:
    both = gemm(SR, SR)
    graph, context = before(rewritten(MLP(), x(), policy=policy(both, both, both)), "insert_quantize")
    InsertQuantize().run(graph, context)
    calls = [n.args for n in fp4_nodes(graph, "quantize")]
    assert len({site for *_, site in calls}) == len(calls) == 18
    assert len({seed for *_, seed, _ in calls}) == 1
    assert None not in {seed for *_, seed, _ in calls}


def test_nearest_rounding_draws_nothing() -> None:
    both = gemm(NVFP4, NVFP4)
    graph, context = before(rewritten(MLP(), x(), policy=policy(both, both, both)), "insert_quantize")
    InsertQuantize().run(graph, context)
    assert {n.args[3] for n in fp4_nodes(graph, "quantize")} == {None}
    assert ops(graph)["fp4::seed"] == 0


@pytest.mark.parametrize("rows", [32, 40])
@pytest.mark.parametrize("autocast", [False, True])
def test_values_on_the_grid_give_the_product_itself(autocast: bool, rows: int) -> None:
    """0, 1 and 2 times a power of two are E2M1 numbers: nothing is rounded, so the graph computes what it did before."""
    both = gemm(MXFP4, MXFP4)
    got = rewritten(nn.Linear(64, 96, bias=False), x(rows), policy=policy(both, both, both), autocast=autocast)
    graph, context = before(got, "insert_quantize")
    inputs = integers(graph, 2)
    expected = evaluate(graph, inputs)
    assert InsertQuantize().run(graph, context)
    assert sum(quantizers(graph).values()) == 6
    assert equal(evaluate(graph, inputs), expected)


def test_other_values_are_rounded() -> None:
    """The test above can fail."""
    both = gemm(MXFP4, MXFP4)
    graph, context = before(rewritten(nn.Linear(64, 96), x(), policy=policy(both, both, both)), "insert_quantize")
    inputs = gaussians(graph)
    expected = evaluate(graph, inputs)
    InsertQuantize().run(graph, context)
    changed = [not torch.equal(a, b) for a, b in zip(evaluate(graph, inputs), expected, strict=True)]
    assert sum(changed) == 3  # Y, dX, dW; the bias's gradient reads the unrounded dY


def test_where_the_copies_are_made() -> None:
    """X for wgrad in forward, W for dgrad in backward, dY at its product."""
    both = gemm(NVFP4, NVFP4)
    tags = {}
    for save in (False, True):
        got = rewritten(nn.Linear(64, 96), x(), policy=policy(both, both, both), save_weights=save)
        graph, context = before(got, "insert_quantize")
        InsertQuantize().run(graph, context)
        mms = {str(n.meta["fp4"]).split()[-1]: n for n in fp4_nodes(graph, "mm")}
        linear = context.linears[0]
        for role, site in linear.gemms.items():
            for i in (0, 1):
                codes = mms[role].args[site.slot(i)].args[0]  # type: ignore[union-attr]
                tags[save, str(role), i] = codes.meta["partitioner_tag"]  # type: ignore[union-attr]
    assert {k[1:]: v for k, v in tags.items() if not k[0]} == {
        ("fprop", 0): "is_forward",
        ("fprop", 1): "is_forward",
        ("dgrad", 0): "is_backward",
        ("dgrad", 1): "must_be_in_backward",
        ("wgrad", 0): "is_backward",
        ("wgrad", 1): "is_forward",
    }
    assert tags[True, "dgrad", 1] == "is_forward"
