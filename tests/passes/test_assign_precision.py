"""assign_precision: the products the policy quantizes become fp4::mm, every product is marked with its decision."""

from __future__ import annotations

import pytest
import torch

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.sites import find_gemms
from fp4.passes.assign_precision import AssignPrecision
from fp4.passes.tag_gemms import TagGemms
from tests.graphs import MLP, before, equal, evaluate, integers, ops, rewritten

NVFP4 = fp4.GemmPrecision(fp4.Operand(fp4.NVFP4()), fp4.Operand(fp4.NVFP4()))


def policy(**gemms: fp4.GemmPrecision) -> fp4.Policy:
    return fp4.Policy("test", fp4.LinearPrecision(**gemms))


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_one_kind_of_product_changes(role: str) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    graph, context = before(rewritten(MLP(), x, policy=policy(**{role: NVFP4})), "assign_precision")
    assert AssignPrecision().run(graph, context)
    assert {n.meta["fp4"] for n in fp4_nodes(graph, "mm")} == {f"{name} {role}" for name in "abc"}
    assert ops(graph)["aten::mm"] == 6


def test_a_policy_that_quantizes_nothing_changes_nothing_and_marks_all() -> None:
    graph, context = before(rewritten(MLP(), torch.randn(32, 64, requires_grad=True), policy=policy()), "assign_precision")
    text = str(graph)
    assert not AssignPrecision().run(graph, context)
    assert str(graph) == text
    assert sorted(n.meta["fp4"] for n in find_gemms(graph)) == sorted(
        f"{name} {role}" for name in "abc" for role in ("fprop", "dgrad", "wgrad")
    )


def test_unknown_products_stay_and_are_marked() -> None:
    model = MLP()
    got = rewritten(lambda x: model(x @ x.t() @ x), torch.randn(64, 64, requires_grad=True), policy=policy(fprop=NVFP4))
    marks = [n.meta["fp4"] for n in got.joint.stages["assign_precision"].nodes if n.target is torch.ops.aten.mm.default]
    assert sum("unknown: no operand is a parameter" in m for m in marks) == 2


def test_the_bias_stays_in_the_product() -> None:
    graph, context = before(
        rewritten(MLP(True), torch.randn(32, 64, requires_grad=True), policy=policy(fprop=NVFP4)), "assign_precision"
    )
    biases = [n.args[0] for n in graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)]
    AssignPrecision().run(graph, context)
    assert [n.args[3] for n in fp4_nodes(graph, "mm")] == biases
    assert len(biases) == 3


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_mm_s_own(bias: bool, autocast: bool) -> None:
    """Whole numbers: each sum is exact in FP32 in any order, so both products are that sum rounded once."""
    got = rewritten(
        MLP(bias),
        torch.randn(2, 16, 64, requires_grad=True),
        policy=policy(fprop=NVFP4, dgrad=NVFP4, wgrad=NVFP4),
        autocast=autocast,
    )
    graph, context = before(got, "assign_precision")
    inputs = integers(graph, 1)
    expected = evaluate(graph, inputs)
    assert AssignPrecision().run(graph, context)
    assert ops(graph)["fp4::mm"] == 9
    assert equal(evaluate(graph, inputs), expected)


def test_a_second_visit_changes_nothing() -> None:
    got = rewritten(MLP(True), torch.randn(32, 64, requires_grad=True), policy=policy(fprop=NVFP4))
    graph, context = before(got, "insert_rotation")
    text = str(graph)
    TagGemms().run(graph, context)
    assert not AssignPrecision().run(graph, context)
    assert str(graph) == text
