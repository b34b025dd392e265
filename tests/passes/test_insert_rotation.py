"""insert_rotation: both operands of a product, one sign vector; it cancels."""

from __future__ import annotations

import pytest
import torch

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.passes.insert_rotation import InsertRotation
from tests.graphs import MLP, before, equal, evaluate, integers, rewritten

BARE = fp4.GemmPrecision(fp4.Operand(fp4.NVFP4()), fp4.Operand(fp4.NVFP4()))


def rotated(**fields: object) -> fp4.GemmPrecision:
    return fp4.GemmPrecision(fp4.NVFP4(), fp4.NVFP4(), fp4.Rotation(**fields))  # type: ignore[arg-type]


def policy(fprop: fp4.GemmPrecision, dgrad: fp4.GemmPrecision, wgrad: fp4.GemmPrecision) -> fp4.Policy:
    return fp4.Policy("test", fp4.LinearPrecision(fprop, dgrad, wgrad))


def x(rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64, requires_grad=True)


def test_both_operands_of_the_products_that_ask() -> None:
    graph, context = before(rewritten(MLP(), x(), policy=policy(BARE, BARE, rotated(signs="fixed"))), "insert_rotation")
    assert InsertRotation().run(graph, context)
    for mm in fp4_nodes(graph, "mm"):
        is_wgrad = str(mm.meta["fp4"]).endswith("wgrad")
        assert [a.target is torch.ops.fp4.rotate.default for a in mm.args[:2]] == [is_wgrad] * 2  # type: ignore[union-attr]
    assert len(list(fp4_nodes(graph, "rotate"))) == 6


def test_no_rotation_no_change() -> None:
    graph, context = before(rewritten(MLP(), x(), policy=policy(BARE, BARE, BARE)), "insert_rotation")
    text = str(graph)
    assert not InsertRotation().run(graph, context)
    assert str(graph) == text


def test_a_product_s_operands_share_their_signs_and_no_two_products_do() -> None:
    fresh = rotated(signs="fresh", bf16=False)
    graph, context = before(rewritten(MLP(), x(), policy=policy(fresh, fresh, fresh)), "insert_rotation")
    InsertRotation().run(graph, context)
    sites = []
    for mm in fp4_nodes(graph, "mm"):
        first, second = (a.args for a in mm.args[:2])  # type: ignore[union-attr]
        assert first[1:] == second[1:]
        assert first[2] is not None  # the graph's seed
        sites.append(first[3])
    assert len(set(sites)) == len(sites) == 9
    assert len(graph.find_nodes(op="call_function", target=torch.ops.fp4.seed.default)) == 1


@pytest.mark.parametrize(
    ("signs", "size", "rows"), [("none", 16, 32), ("fixed", 16, 40), ("fixed", 64, 32), ("fresh", 16, 32), ("fresh", 64, 40)]
)
def test_it_cancels_in_the_product(signs: str, size: int, rows: int) -> None:
    """Whole numbers, a size whose root is a power of two: every step is exact in FP32, and the products are unchanged.

    40 rows: wgrad's contracted dimension is padded with zeros.
    """
    rotation = rotated(size=size, signs=signs, bf16=False)
    graph, context = before(rewritten(MLP(), x(rows), policy=policy(rotation, rotation, rotation)), "insert_rotation")
    inputs = integers(graph, 1)
    expected = evaluate(graph, inputs)
    InsertRotation().run(graph, context)
    assert equal(evaluate(graph, inputs), expected)


def test_it_does_not_cancel_with_two_sign_vectors() -> None:
    """The test above can fail."""
    fresh = rotated(signs="fresh", bf16=False)
    graph, context = before(rewritten(MLP(), x(), policy=policy(fresh, fresh, fresh)), "insert_rotation")
    inputs = integers(graph, 1)
    expected = evaluate(graph, inputs)
    InsertRotation().run(graph, context)
    node = next(fp4_nodes(graph, "rotate"))
    node.update_arg(3, 999)
    assert not equal(evaluate(graph, inputs), expected)
