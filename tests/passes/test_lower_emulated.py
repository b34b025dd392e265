"""lower_emulated: an operand's rotation and quantizer become one op, packed only where the codes are saved; bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.fx import Graph, GraphModule

import fp4
from fp4.passes.lower_emulated import LowerEmulated
from fp4.passes.lower_reference import LowerReference
from tests.graphs import MLP, equal, evaluate, gaussians, ops, rewritten

LOWER = LowerEmulated(device="cpu")


def graphs(name: str, rows: int = 64) -> list[Graph]:
    """The forward and backward graph of the recipe."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    got = rewritten(MLP(), x, policy=fp4.recipe(name, keep_heads=False, high_precision_tail=0.0), autocast=True)
    return [got.forward[0].graph, got.backward[0].graph]


def lowered(graph: Graph, p: LowerEmulated = LOWER) -> tuple[bool, Graph]:
    copied = GraphModule(graph.owning_module or torch.nn.Module(), copy.deepcopy(graph)).graph
    changed = p.run(copied)
    copied.lint()
    return changed, copied


def test_nvfp4_is_one_kernel_an_operand() -> None:
    """Forward: X and W of fprop are never packed; wgrad's X is where it is saved as codes, the model's input. Backward: the two
    ReLU's outputs are alive, and quantized there; nothing is packed."""
    forward, backward = (lowered(g)[1] for g in graphs("nvfp4"))
    for graph, packed, unpacked in ((forward, 1, 6), (backward, 0, 11)):
        counts = ops(graph)
        assert counts["fp4::rotate_quantize"] == packed
        assert counts["fp4::fake_quantize"] == unpacked
        assert counts["fp4::quantize"] == counts["fp4::rotate"] == 0
    assert ops(forward)["fp4::dequantize"] == 0
    assert ops(backward)["fp4::dequantize"] == 1  # of the saved codes


def test_a_graph_on_another_device_is_left_alone() -> None:
    for graph in graphs("nvfp4"):
        changed, same = lowered(graph, LowerEmulated())
        assert not changed
        assert ops(same) == ops(graph)


@pytest.mark.parametrize("name", [n for n in fp4.recipes() if n != "bf16"])
def test_the_same_bits(name: str) -> None:
    for graph in graphs(name, rows=40):
        _, new = lowered(graph)
        assert not ops(new)["fp4::quantize"]
        placeholders = graph.find_nodes(op="placeholder")
        inputs = [
            torch.full(n.meta["val"].shape, 56, dtype=torch.uint8) if n.meta["val"].dtype == torch.uint8 else v
            for n, v in zip(placeholders, gaussians(graph), strict=True)
        ]
        assert equal(evaluate(graph, inputs), evaluate(new, inputs))


def test_the_reference_lowering_leaves_the_kernels() -> None:
    for graph in graphs("quartet2"):
        _, new = lowered(graph)
        before = ops(new)
        assert LowerReference().run(new)
        assert {n: c for n, c in ops(new).items() if n.startswith("fp4::")} == {
            n: before[n] for n in ("fp4::fake_quantize", "fp4::rotate_quantize", "fp4::seed") if before[n]
        }
