"""lower_blackwell, swizzle_scales: GEMMs on packed codes, per GEMM, with the same results; the reasons where they are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import fp4
from fp4.compiler.backend import OptionError, Options
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.lowering import LoweringOptions
from fp4.compiler.policy import GemmPrecision, LinearPrecision, Operand, Policy
from fp4.compiler.report import describe
from fp4.passes import lowering
from fp4.passes.lower_blackwell import LowerBlackwell
from fp4.passes.lower_reference import LowerReference
from fp4.passes.swizzle_scales import SwizzleScales
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation
from tests.graphs import MLP, evaluate, gaussians, ops, rewritten

# Up to the lowering to ATen, which has tests of its own.
PASSES = [p for p in lowering(LoweringOptions(target="sm_100a")) if not isinstance(p, LowerReference)]


def graphs(policy: Policy, rows: int = 64, model: Any = None, dynamic: bool | None = None, **options: Any) -> list[Graph]:
    """The forward and backward graph under a policy."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    got = rewritten(model or MLP(), x, policy=policy, autocast=True, dynamic=dynamic, **options)
    return [got.forward[0].graph, got.backward[0].graph]


def recipe(name: str) -> Policy:
    return fp4.recipe(name, keep_heads=False, high_precision_tail=0.0)


def compiled_step(name: str, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients of a linear's step under a recipe, compiled by Inductor."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
    x = torch.randn(40, 64, requires_grad=True)
    torch.manual_seed(1)
    given = {"policy": recipe(name), "inductor": {"fallback_random": True}, **options}
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(model, backend="fp4", options=given)(x)
    y.float().pow(2).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def policy(first: Quantizer | None, second: Quantizer | None, rotation: Rotation | None = None) -> Policy:
    gemm = GemmPrecision(Operand(first), Operand(second), rotation)
    return Policy("test", LinearPrecision(gemm, gemm, gemm))


def lowered(graph: Graph, passes: Any = PASSES) -> Graph:
    copied = GraphModule(graph.owning_module or nn.Module(), copy.deepcopy(graph)).graph
    for p in passes:
        p.run(copied)
    copied.lint()
    return copied


def inputs_of(graph: Graph, byte: int = 56) -> list[Any]:
    """Gaussians for a graph's inputs; saved codes and scales are all the one byte."""
    return [
        torch.full(n.meta["val"].shape, byte, dtype=torch.uint8) if n.meta["val"].dtype == torch.uint8 else v
        for n, v in zip(graph.find_nodes(op="placeholder"), gaussians(graph), strict=True)
    ]


def same(graph: Graph, new: Graph) -> None:
    """Both graphs compute the same, in every bit."""
    inputs = inputs_of(graph)
    first, second = evaluate(graph, inputs), evaluate(new, inputs)
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [n for n in fp4.recipes() if n != "bf16"])
@pytest.mark.parametrize("rows", [64, 40])
def test_the_same_bits(name: str, rows: int) -> None:
    for graph in graphs(recipe(name), rows):
        same(graph, lowered(graph))


def test_nvfp4_multiplies_codes_alone() -> None:
    """Nine GEMMs on packed operands, none decoded; scales that nothing else reads leave their kernel swizzled."""
    forward, backward = (lowered(g) for g in graphs(recipe("nvfp4")))
    for graph, products in ((forward, 3), (backward, 6)):
        counts = ops(graph)
        assert counts["fp4::scaled_mm"] == products
        assert counts["fp4::mm"] == counts["fp4::dequantize"] == counts["fp4::fake_quantize"] == counts["fp4::quantize"] == 0
    # Forward saves one operand's scales, the input's of wgrad, as they are; it does not multiply it.
    assert ops(forward)["fp4::swizzle_rows"] == 0
    # Backward swizzles what forward saved.
    assert ops(backward)["fp4::swizzle_rows"] == 1
    for node in forward.find_nodes(op="call_function", target=torch.ops.fp4.scaled_mm.default):
        assert None not in node.args[7:9]  # both tensor scales: no product of them is a kernel
        assert node.meta["val"].dtype == torch.bfloat16


def kernels(graph: Graph) -> int:
    """Kernels that a lowered graph launches for its linears: one an op, and one for an amax that a quantize op makes itself."""
    found = 0
    for node in fp4_nodes(graph):
        found += node.target is not torch.ops.fp4.seed.default
        if node.target is torch.ops.fp4.rotate_quantize.default:
            found += node.args[1] is None and Quantizer.parse(str(node.args[2])).needs_amax
    return found


@pytest.mark.parametrize(("name", "budget"), [("nvfp4", (7, 9)), ("mxfp4_h16", (4, 6)), ("mxfp8", (4, 6))])
def test_the_kernels_of_a_linears_step(name: str, budget: tuple[int, int]) -> None:
    """Three operands quantized in forward, one GEMM; three and two GEMMs in backward, and the swizzle of the saved scales."""
    forward, backward = (lowered(g) for g in graphs(recipe(name), model=nn.Linear(64, 96, bias=False)))
    assert (kernels(forward), kernels(backward)) == budget


def test_a_bias_is_in_the_epilogue() -> None:
    forward, _ = graphs(recipe("nvfp4"), model=MLP(bias=True))
    new = lowered(forward)
    assert [n.args[9] is not None for n in new.find_nodes(op="call_function", target=torch.ops.fp4.scaled_mm.default)] == [
        True
    ] * 3
    same(forward, new)


@pytest.mark.parametrize("save_weights", [False, True])
@pytest.mark.parametrize("q", [NVFP4(block=(16, 16)), MXFP4(block=(32, 32)), MXFP8(block=(32, 32))], ids=str)
def test_square_blocks_are_quantized_or_transposed_for_dgrad(q: Quantizer, save_weights: bool) -> None:
    """dgrad contracts the other dimension of W: quantized again as W^T, or, where forward saved the codes, transposed."""
    other = type(q)()
    gemm = GemmPrecision(Operand(other), Operand(q))
    wgrad = GemmPrecision(Operand(other), Operand(other))
    for graph in graphs(Policy("test", LinearPrecision(gemm, gemm, wgrad)), rows=40, save_weights=save_weights):
        new = lowered(graph)
        assert ops(new)["fp4::mm"] == 0
        same(graph, new)
    assert (ops(new)["fp4::transpose_codes"] > 0) == save_weights


@pytest.mark.parametrize(
    ("first", "second", "target"),
    [
        (FP8(), FP8(block=(128, 128)), "sm_100a"),
        (NVFP4(outer=128), NVFP4(outer=128), "sm_100a"),
        (NVFP4(), None, "sm_100a"),
        (MXFP8(), MXFP4(), "sm_120a"),
        (NVFP4(), NVFP4(), "sm_121a"),
        (NVFP4(), NVFP4(), "sm_90"),
    ],
    ids=str,
)
def test_what_the_tensor_cores_do_not_have_is_left_alone(first: Quantizer, second: Quantizer | None, target: str) -> None:
    for graph in graphs(policy(first, second)):
        copied = copy.deepcopy(graph)
        assert not LowerBlackwell(target).run(copied)
        assert ops(copied) == ops(graph)
        assert not SwizzleScales().run(copied)


def test_a_graph_on_another_device_is_left_alone() -> None:
    for graph in graphs(recipe("nvfp4")):
        copied = copy.deepcopy(graph)
        assert not LowerBlackwell().run(copied)
        assert ops(copied) == ops(graph)


def test_one_gemm_of_three_falls_back() -> None:
    precision = LinearPrecision(
        GemmPrecision(Operand(NVFP4()), Operand(NVFP4())),
        GemmPrecision(Operand(FP8()), Operand(FP8())),
        GemmPrecision(Operand(MXFP8()), Operand(MXFP4())),
    )
    forward, backward = (lowered(g) for g in graphs(Policy("test", precision)))
    assert (ops(forward)["fp4::scaled_mm"], ops(forward)["fp4::mm"]) == (3, 0)
    assert (ops(backward)["fp4::scaled_mm"], ops(backward)["fp4::mm"]) == (3, 3)


def test_the_report_gives_the_reason() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    precision = LinearPrecision(
        GemmPrecision(Operand(NVFP4()), Operand(NVFP4())), GemmPrecision(Operand(FP8()), Operand(FP8())), GemmPrecision()
    )
    for target, reasons in ((None, ("", "", "")), ("sm_100a", ("", "FP32 block scales", ""))):
        got = rewritten(MLP(), x, policy=Policy("test", precision), target=target)
        for gemm, reason in zip(got.report.linears[0].gemms, reasons, strict=True):
            assert reason in gemm.emulated
            assert bool(gemm.emulated) == bool(reason)
    assert "emulated: fp8 has FP32 block scales" in str(fp4.report(got.model))
    for kernels in (True, False):
        cores = LoweringOptions(kernels=kernels, target="sm_100a").tensor_cores(got.joint.final)
        gemms = describe(got.joint.context, "training", cores).linears[0].gemms
        assert ["kernels=False" in g.emulated for g in gemms] == [not kernels, not kernels, False]


def test_a_mask_keeps_its_scales_and_the_gemm_its_codes() -> None:
    """The kernel that writes QuEST's clip mask writes plain scales, so the GEMM's are a swizzled copy."""
    forward = lowered(graphs(recipe("quartet"))[0])
    assert ops(forward)["fp4::quantize_masked"] > 0
    assert ops(forward)["fp4::scaled_mm"] == 3
    assert ops(forward)["fp4::swizzle_rows"] > 0


def test_the_library_multiplies_where_it_has_the_formats() -> None:
    passes = [p for p in lowering(LoweringOptions(target="sm_121a", library=True)) if not isinstance(p, LowerReference)]
    for name, op in (("nvfp4", "fp4::library_scaled_mm"), ("fp8", "fp4::mm")):
        for graph in graphs(recipe(name), rows=40):
            new = lowered(graph, passes)
            assert ops(new)[op] > 0
            assert ops(new)["fp4::scaled_mm"] == 0
            same(graph, new)
    mixed = policy(MXFP8(), MXFP4())  # the generated kernel has it
    passes = [p for p in lowering(LoweringOptions(target="sm_100a", library=True)) if not isinstance(p, LowerReference)]
    assert ops(lowered(graphs(mixed)[0], passes))["fp4::scaled_mm"] == 3


def test_an_fp32_result_of_mxfp4_is_the_generated_kernel_s() -> None:
    """The library's is BF16."""
    q = Operand(MXFP4())
    passes = [p for p in lowering(LoweringOptions(target="sm_100a", library=True)) if not isinstance(p, LowerReference)]
    for output, op in (("", "fp4::library_scaled_mm"), ("fp32", "fp4::scaled_mm")):
        wgrad = Policy("wgrad", LinearPrecision(wgrad=GemmPrecision(q, q, output=output)))
        (_, backward) = graphs(wgrad)
        new = lowered(backward, passes)
        assert ops(new)[op] == 3
        same(backward, new)


def test_dynamic_shapes() -> None:
    for graph in graphs(recipe("nvfp4"), rows=48, dynamic=True):
        assert ops(lowered(graph))["fp4::scaled_mm"] > 0


def test_an_unknown_target_is_an_error() -> None:
    with pytest.raises(OptionError, match="sm_100a"):
        Options.read({"target": "b200"}, None)
    with pytest.raises(OptionError, match="kernels=True"):
        Options.read({"target": "sm_100a", "kernels": False}, None)


@pytest.mark.slow
def test_a_step_compiled_for_blackwell_is_the_step() -> None:
    """Through Inductor on a CPU, where fp4::scaled_mm is the oracle's GEMM."""

    plain, blackwell = compiled_step("nvfp4"), compiled_step("nvfp4", target="sm_100a")
    for name, value in plain.items():
        assert torch.equal(value, blackwell[name]), name
