"""ao#2228: with Inductor's freezing the quantized weights were folded to constants and the model ran in high precision."""

from __future__ import annotations

import pytest
import torch

import fp4
from tests.graphs import MLP, ops, rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64), (1, 64)])
def test_the_products_and_their_quantizers_are_still_there(shape: tuple[int, ...], autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = MLP(True).eval(), torch.randn(shape)
    plain = rewritten(model, x, policy=ALL, train=False, autocast=autocast)
    frozen = rewritten(model, x, policy=ALL, train=False, autocast=autocast, inductor={"freezing": True})
    (graph,) = [gm.graph for gm in frozen.inference]
    assert ops(graph)["fp4::mm"] == 3
    assert ops(graph)["fp4::quantize"] == 6
    assert torch.equal(frozen.output, plain.output)
