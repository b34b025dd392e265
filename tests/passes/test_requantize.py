"""requantize: a backward product reads what fprop multiplied; its result is masked and rotated back into the model's space."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.passes.requantize import Requantize
from fp4.runtime import reference
from tests.graphs import MLP, before, interpreted, nbytes, ops, rewritten, saved

ops_ = torch.ops.fp4
QUEST = fp4.MXFP4(scale_rule="quest")
COPY = fp4.Operand(None, source="forward")  # the decoded copy itself, not quantized again


def policy(forward: Any, rotation: fp4.Rotation | None, dgrad: Any = COPY, wgrad: Any = COPY) -> fp4.Policy:
    linear = fp4.LinearPrecision(
        fp4.GemmPrecision(forward, forward, rotation), fp4.GemmPrecision(None, dgrad), fp4.GemmPrecision(None, wgrad)
    )
    return fp4.Policy("test", linear)


def x(rows: int = 32, columns: int = 64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5), requires_grad=True)


def test_quartet2_reads_the_forward_s_codes() -> None:
    """dY x W and dY x X: rotate and quantize of the decoded copy; each product has the forward's tensor scale in its alpha."""
    graph, context = before(rewritten(MLP(), x(), policy=fp4.recipe("quartet2", keep_heads=False)), "requantize")
    assert ops(graph)["fp4::quantize"] == 6
    assert Requantize().run(graph, context)
    counts = ops(graph)
    assert counts["fp4::rotate"] == 12
    assert counts["fp4::quantize"] == 6 + 12 + 3  # and the backward's own copies of the weights
    for mm in fp4_nodes(graph, "mm"):
        role = str(mm.meta["fp4"]).rpartition(" ")[2]
        rotated = [a.args[0].args[0].args[0].target is ops_.rotate.default for a in mm.args[:2]]  # type: ignore[union-attr]
        assert rotated == [role != "fprop"] * 2


def test_forward_saves_x_s_codes_alone() -> None:
    """In BF16's place: 4 bits an element, 8 bits a block of 16, along K; no copy of X along the tokens, none of W."""
    rows = 64
    got = rewritten(MLP(), x(rows), policy=fp4.recipe("quartet2", keep_heads=False), autocast=True)
    codes = [n for n in saved(got) if n.op != "placeholder" and n.meta["val"].dtype == torch.uint8]
    assert sum(map(nbytes, codes)) == sum(rows * k // 2 + rows * k // 16 for k in (64, 64, 96))


def test_nothing_to_do() -> None:
    graph, context = before(
        rewritten(MLP(), x(), policy=fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)), "requantize"
    )
    text = str(graph)
    assert not Requantize().run(graph, context)
    assert str(graph) == text


def _copies(model: nn.Linear, leaf: Tensor, q: fp4.Quantizer, rotation: fp4.Rotation | None) -> list[Tensor]:
    """Fprop's X and W as it multiplied them, tensor scale included, FP32; rotated where it rotates."""
    found = []
    for t in (leaf.detach(), model.weight.detach()):
        r = t if rotation is None else reference.rotate(t, rotation, None, 0)
        found.append(reference.dequantize(*reference.quantize(r, q), q, r.shape[1], torch.float32))
    return found


@pytest.mark.parametrize("columns", [64, 40])
@pytest.mark.parametrize("rotation", [None, fp4.Rotation(32, bf16=False), fp4.Rotation(64, signs="fixed", bf16=False)])
def test_gradient_of_the_function_computed(rotation: fp4.Rotation | None, columns: int) -> None:
    """With the copies not quantized again, dX = dY Wq and dW = dY^T Xq, rotated back."""
    model, leaf = nn.Linear(columns, 48, bias=False), x(32, columns)
    got = interpreted(model, leaf, policy(QUEST, rotation))
    xq, wq = _copies(model, leaf, QUEST, rotation)
    dy = torch.randn(32, 48, generator=torch.Generator().manual_seed(4))
    dx, dw = reference.mm(dy, wq.t(), None, None, torch.float32), reference.mm(dy.t(), xq.t(), None, None, torch.float32)
    if rotation is not None:
        dx, dw = (reference.unrotate(g, rotation, None, 0, columns, torch.float32) for g in (dx, dw))
    assert torch.equal(got["input"], dx)
    assert torch.equal(got["weight"], dw)


def test_clip_mask() -> None:
    """Where QuEST clipped X no gradient reaches it; the others' is as without the mask."""
    model, leaf = nn.Linear(64, 48, bias=False), x()
    free = interpreted(model, leaf, policy(QUEST, None))
    masked = interpreted(model, leaf, policy(fp4.Operand(QUEST, clip_gradient=True), None))
    for name, value in (("input", leaf.detach()), ("weight", model.weight.detach())):
        _, scales, _ = reference.quantize(value, QUEST)
        scale = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
        kept = value.abs() / scale < 6
        assert 0 < int(kept.sum()) < kept.numel()
        assert torch.equal(masked[name], torch.where(kept, free[name], 0.0))


def test_weights_in_the_other_layout_and_tensor_scales() -> None:
    """x @ W, with W (K, N): the same gradients as nn.Linear's, transposed."""

    class Product(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.detach().t().contiguous())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    linear, leaf = nn.Linear(40, 48, bias=False), x(32, 40)
    for p in (fp4.recipe("quartet", keep_heads=False), policy(fp4.NVFP4(four_six=True), None)):
        straight, other = interpreted(linear, leaf, p), interpreted(Product(linear.weight), leaf, p)
        assert torch.equal(straight["output"], other["output"])
        assert torch.equal(straight["input"], other["input"])
        assert torch.equal(straight["weight"].t(), other["weight"])


def test_saved_weights_are_the_same_values() -> None:
    model, leaf = MLP(), x()
    for name in ("quartet2", "quartet", "tetrajet2"):
        p = fp4.recipe(name, keep_heads=False)
        anew, kept = interpreted(model, leaf, p), interpreted(model, leaf, p, save_weights=True)
        assert all(torch.equal(anew[n], kept[n]) for n in anew), name
