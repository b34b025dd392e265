"""lower_emulated: an operand's rotation and quantizer become one op, packed only where the codes are saved; bit for bit."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fp4
import fp4.kernels.ops  # registers the ops
from fp4.compiler.graph import fp4_nodes, is_transpose
from fp4.passes.lower_emulated import LowerEmulated
from fp4.passes.lower_reference import LowerReference
from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer
from tests.graphs import MLP, equal, evaluate, gaussians, ops, rewritten

LOWER = LowerEmulated(device="cpu")


def graphs(name: str, rows: int = 64, **options: bool) -> list[Graph]:
    """The forward and backward graph of the recipe."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    got = rewritten(MLP(), x, policy=fp4.recipe(name, keep_heads=False, high_precision_tail=0.0, **options), autocast=True)
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
    assert ops(forward)["fp4::decode"] == 0
    assert ops(backward)["fp4::decode"] == 1  # of the saved codes
    assert ops(backward)["fp4::dequantize"] == 0


def test_a_graph_on_another_device_is_left_alone() -> None:
    for graph in graphs("nvfp4"):
        changed, same = lowered(graph, LowerEmulated())
        assert not changed
        assert ops(same) == ops(graph)


def input_of(node: Node) -> Node:
    (first, *_) = node.args
    assert isinstance(first, Node)
    return first


@pytest.mark.parametrize(
    ("name", "options"), [*((n, {}) for n in fp4.recipes() if n != "bf16"), ("quartet2", {"posthoc": True})]
)
def test_the_same_bits(name: str, options: dict[str, bool]) -> None:
    for graph in graphs(name, rows=40, **options):
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
            n: before[n]
            for n in ("fp4::fake_quantize", "fp4::rotate_quantize", "fp4::fake_requantize", "fp4::decode", "fp4::seed")
            if before[n]
        }


@pytest.mark.parametrize("name", ["quartet2", "quartet"])
def test_the_backward_quantizes_from_codes(name: str) -> None:
    """The forward copy of X and W, decoded, transposed and rotated, is read from its codes: never decoded to memory."""
    _, backward = (lowered(g)[1] for g in graphs(name))
    counts = ops(backward)
    assert counts["fp4::fake_requantize"] == 6  # W and X of three linears
    made_again = counts["fp4::rotate_quantize"] + counts["fp4::quantize_masked"]
    assert made_again == 3  # the weights' codes, from the parameters
    assert counts["fp4::dequantize"] == counts["fp4::quantize"] == 0
    again = list(fp4_nodes(backward, "fake_requantize"))
    assert [input_of(n).op for n in again].count("placeholder") == 3  # X's codes, saved by forward
    assert all(n.args[2] is None for n in again)  # no factor


def test_a_decoded_matrix_that_another_node_reads_stays() -> None:
    """Then it is in memory anyway, and the kernel reads it there."""
    for user in ("dequantize", "permute"):
        _, backward = graphs("quartet2")
        copied = copy.deepcopy(backward)
        quantize = list(fp4_nodes(copied, "quantize"))[-1]
        transpose = input_of(input_of(quantize))  # below the rotation
        read = transpose if user == "permute" else input_of(transpose)
        with copied.inserting_after(read):
            other = copied.call_function(torch.ops.aten.neg.default, (read,))
            other.meta["val"] = read.meta["val"]
        (returned,) = copied.output_node().args
        assert isinstance(returned, list | tuple)
        copied.output_node().args = ((*returned, other),)
        _, new = lowered(copied)
        assert ops(new)["fp4::fake_requantize"] == 5


def _again(codes: torch.Tensor, scales: torch.Tensor, source: str, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = torch.ops.fp4.dequantize(codes, scales, None, source, width, dtype).t()
    return torch.ops.fp4.quantize(x, torch.ops.fp4.amax(x), "nvfp4", None, 0)


def test_what_the_kernels_do_not_read_is_decoded() -> None:
    """FP16 values, and codes of a quantizer with two-byte elements or other blocks."""
    codes, scales = torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 4, dtype=torch.uint8)
    for source, dtype, fused in (
        ("nvfp4", torch.bfloat16, 1),
        ("nvfp4", torch.float32, 1),
        ("nvfp4", torch.float16, 0),
        ("mxfp8", torch.bfloat16, 0),
    ):
        width = 64 if source == "nvfp4" else 32
        blocks = scales[:, : width // (16 if source == "nvfp4" else 32)]

        run = functools.partial(_again, source=source, width=width, dtype=dtype)
        graph = make_fx(run, tracing_mode="fake")(codes, blocks).graph
        _, new = lowered(graph)
        assert ops(new)["fp4::requantize"] == fused
        assert ops(new)["fp4::rotate_quantize"] == 1 - fused
        assert equal(evaluate(graph, [codes, blocks]), evaluate(new, [codes, blocks]))


def test_an_amax_is_one_for_an_operand_and_its_transpose() -> None:
    """Of an unrotated operand Inductor computes it, right where the operand is made; a rotated one's is the kernel's own."""
    _, backward = graphs("all_the_way")
    before = [n.args[0] for n in fp4_nodes(backward, "amax")]
    new = lowered(backward)[1]
    amaxes = list(fp4_nodes(new, "amax"))
    assert len(amaxes) < len(before)
    assert len({n.args[0] for n in amaxes}) == len(amaxes)
    assert not any(is_transpose(n.args[0]) for n in amaxes)
    order = {n: i for i, n in enumerate(new.nodes)}
    for kernel in fp4_nodes(new, "fake_quantize"):
        assert kernel.args[1] is not None
        assert order[kernel.args[1]] < order[kernel]
    for graph in graphs("nvfp4"):
        for name in ("fake_quantize", "rotate_quantize"):
            for kernel in fp4_nodes(lowered(graph)[1], name):
                assert (kernel.args[1] is None) == bool(kernel.args[3])


@pytest.mark.parametrize("q", [NVFP4(), NVFP4(outer=128), MXFP4(scale_rule="range_fit")], ids=str)
def test_the_tensor_scale_beside_decoded_values(q: Quantizer) -> None:
    """Outer scales are in the values, and there are none beside them."""
    op, x = torch.ops.fp4.fake_quantize.default, torch.randn(40, 200)
    arguments = (x, None, str(q), "", None, 0, 0, False, torch.float32)
    values, factor = op(*arguments)
    codes, scales, tensor_scale = reference.quantize(x, q)
    times = (codes, scales, tensor_scale, q, 200, torch.float32)
    assert torch.equal(values, reference.dequantize(*times) if q.outer else reference.decode(codes, scales, *times[3:]))
    assert factor.shape == (0,) if q.outer else torch.equal(factor, tensor_scale)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
