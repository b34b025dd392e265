"""output="fp32" of a wgrad: dW goes into an FP32 gradient without a rounding to BF16, or the report says why not."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.runtime import reference
from tests.graphs import MLP, compiled, interpreted, ops, rewritten, step, unequal

BF16, FP32 = torch.bfloat16, torch.float32
NVFP4 = fp4.GemmPrecision(fp4.NVFP4(), fp4.NVFP4(), output="fp32")
WGRAD = fp4.Policy("wgrad", fp4.LinearPrecision(wgrad=NVFP4))
MODEL_S = fp4.Policy("wgrad", fp4.LinearPrecision(wgrad=fp4.GemmPrecision(fp4.NVFP4(), fp4.NVFP4())))


def x(dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def quartet() -> fp4.Policy:
    """dW is masked and rotated back after its product."""
    precision = fp4.recipe("quartet").precision
    return fp4.Policy("quartet", dataclasses.replace(precision, wgrad=dataclasses.replace(precision.wgrad, output="fp32")))


def test_the_product_is_fp32_and_the_cast_after_it_is_gone() -> None:
    policy = fp4.recipe("nvfp4", wgrad_output="fp32", high_precision_tail=0.0)
    wide = rewritten(MLP(), x(), policy=policy, autocast=True)
    own = rewritten(MLP(), x(), policy=fp4.recipe("nvfp4", high_precision_tail=0.0), autocast=True)
    assert {(n.meta["fp4"].split()[1], n.args[-1]) for n in fp4_nodes(wide.joint.final, "mm")} == {
        ("fprop", BF16),
        ("dgrad", BF16),
        ("wgrad", FP32),
    }
    cast = "prims::convert_element_type"
    assert ops(own.joint.final)[cast] - ops(wide.joint.final)[cast] == 3
    assert {(g.role, g.output) for linear in wide.report.linears for g in linear.gemms} == {
        ("fprop", ""),
        ("dgrad", ""),
        ("wgrad", "fp32"),
    }
    assert wide.report.warnings == []
    assert "result in FP32" in str(fp4.report(wide.model))


@pytest.mark.skipif(importlib.util.find_spec("torch_mlir") is None, reason="torch-mlir is not installed")
def test_its_mlir_has_the_type() -> None:
    with torch.autocast("cpu", BF16):
        text = fp4.explain(nn.Linear(64, 48, bias=False), x(), policy=WGRAD).mlir()
    (line,) = [line for line in text.splitlines() if '"fp4.mm"' in line]
    assert line.endswith("-> !torch.vtensor<[48,64],f32>")


def test_the_gradient_is_the_fp32_product_itself() -> None:
    model = nn.Linear(64, 48, bias=False)
    found = {p: interpreted(model, x(), p, autocast=True)["weight"] for p in (WGRAD, MODEL_S)}
    dy = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(4)).to(BF16).flatten(0, 1)  # the tangent of `step`
    operands = [reference.quantize(m.t(), fp4.NVFP4()) for m in (dy, x().detach().to(BF16).flatten(0, 1))]
    decoded = [reference.decode(codes, scales, fp4.NVFP4(), 32, BF16) for codes, scales, _ in operands]
    exact = reference.mm(decoded[0], decoded[1], operands[0][2] * operands[1][2], None, FP32)
    assert torch.equal(found[WGRAD], exact)
    assert not torch.equal(exact.to(BF16).float(), exact)
    assert torch.equal(found[MODEL_S], exact.to(BF16).float())


def test_masked_and_rotated_back_it_stays_fp32() -> None:
    got = rewritten(MLP(), x(), policy=quartet(), autocast=True)
    after = [n for op in ("unrotate", "apply_mask") for n in fp4_nodes(got.joint.final, op)]
    assert sorted(str(n.meta["val"].dtype) for n in after) == ["torch.bfloat16"] * 6 + ["torch.float32"] * 6
    assert all(p.grad is not None and not torch.equal(p.grad, p.grad.to(BF16)) for p in got.model.parameters())


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False)
    expected = interpreted(model, x(), WGRAD, autocast=True)
    torch._dynamo.reset()
    run = compiled(model, policy=WGRAD, inductor={"fallback_random": True})
    assert unequal(step(model, run, x(), autocast=True), expected) == []
    assert expected["weight"].dtype == FP32
    assert not torch.equal(expected["weight"], expected["weight"].to(BF16).float())


def test_an_fp32_model_has_it_already() -> None:
    got = rewritten(MLP(), x(), policy=WGRAD)
    assert got.report.warnings == []
    assert {linear.gemms[2].output for linear in got.report.linears} == {"fp32"}


class Twice(nn.Module):
    """One BF16 copy of an FP32 parameter, multiplied by twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        w = self.w.to(BF16)
        return nn.functional.linear(nn.functional.linear(x, w).relu(), w)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 64, 96, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x.flatten(0, 1), self.up, torch.tensor([16, 32], dtype=torch.int32))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(64, 32).to(BF16), "the parameter is bfloat16 in this graph, and so is its gradient"),
        (Twice(), "aten.add.Tensor reads dW in bfloat16"),
        (Experts(), "stacks of experts have no such product"),
    ],
    ids=["BF16 parameter", "two uses of one copy", "experts"],
)
def test_where_it_cannot_be_the_report_says_why(model: nn.Module, reason: str) -> None:
    got = rewritten(model, x(BF16), policy=WGRAD)
    assert got.report.warnings
    assert all("wgrad: output='fp32' is not done, " in w and w.endswith(reason) for w in got.report.warnings)
    assert {linear.gemms[2].output for linear in got.report.linears} == {""}
