"""nested_compile_region: the pass meets a region's graph again, partitioned, and quantized what was quantized."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp4
from tests.graphs import Captured, ops, rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
HALF = ALL.with_rules(fp4.keep("*.b"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def products(got: Captured) -> list[tuple[int, int, int]]:
    """Of each partitioned region: fp4 products, mm, quantizes."""
    found = []
    for gm in (*got.forward, *got.backward):
        for name, module in gm.named_modules():
            if name and isinstance(module, torch.fx.GraphModule):
                count = ops(module.graph)
                found.append((count["fp4::mm"], count["aten::mm"], count["fp4::quantize"]))
    return found


@pytest.mark.parametrize("blocks", [2, 3])
def test_each_product_is_rewritten_once(blocks: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    got = rewritten(model, torch.randn(32, 64, requires_grad=True), policy=ALL)
    # One region for all blocks. Forward: X by rows and columns and W, twice. Backward: dY by rows and columns and W, twice.
    assert products(got) == [(2, 0, 6), (4, 0, 6)]


def test_a_kept_product_stays_kept() -> None:
    model = nn.Sequential(Block(), Block())
    got = rewritten(model, torch.randn(32, 64, requires_grad=True), policy=HALF)
    assert products(got) == [(1, 1, 3), (2, 2, 3)]
    assert all(report.unknown == {} for report in got.reports)
