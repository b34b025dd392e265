"""share_quantized: one quantize for equal calls, one for W and W^T in square blocks; bitwise neutral."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.passes.share_quantized import ShareQuantized
from tests.graphs import MLP, before, equal, evaluate, gaussians, quantizers, rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


class QKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)


def prepared(model: nn.Module, policy: fp4.Policy = ALL, **how: Any) -> Any:
    return before(rewritten(model, torch.randn(2, 32, 64, requires_grad=True), policy=policy, **how), "share_quantized")


def test_q_k_and_v_share_their_activation() -> None:
    """X by rows 3 -> 1, X rotated 3 -> 1; the gradients, each with its own draws, and the weights stay apart."""
    graph, context = prepared(QKV())
    assert quantizers(graph) == {"nvfp4": 6, "nvfp4[block=16x16]": 6, "nvfp4[rounding=stochastic]": 6}
    assert ShareQuantized().run(graph, context)
    assert quantizers(graph) == {"nvfp4": 2, "nvfp4[block=16x16]": 6, "nvfp4[rounding=stochastic]": 6}
    # dY: three tensors and six rotations before; X's three rotations are one.
    assert len(list(fp4_nodes(graph, "rotate"))) == 4


def test_w_and_its_transpose_share_square_codes() -> None:
    graph, context = prepared(nn.Linear(64, 96), save_weights=True)
    assert quantizers(graph)["nvfp4[block=16x16]"] == 2
    assert ShareQuantized().run(graph, context)
    assert quantizers(graph)["nvfp4[block=16x16]"] == 1
    codes: Any
    (codes,) = {n.args[0] for n in fp4_nodes(graph, "dequantize") if n.args[3] == "nvfp4[block=16x16]"}
    assert len([u for u in codes.users if u.target is torch.ops.fp4.dequantize.default]) == 2


def test_w_and_its_transpose_do_not_share_rows_of_16() -> None:
    policy = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0, weight_block=(1, 16))
    graph, context = prepared(nn.Linear(64, 96), policy, save_weights=True)
    assert quantizers(graph)["nvfp4"] == 4
    ShareQuantized().run(graph, context)
    assert quantizers(graph)["nvfp4"] == 4


def test_random_draws_are_never_merged() -> None:
    """Three linears whose gradient is one tensor: each keeps its own draws."""

    class Sum(QKV):
        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) + self.v(x)

    graph, context = prepared(Sum())
    ShareQuantized().run(graph, context)
    stochastic = [n for n in fp4_nodes(graph, "quantize") if "stochastic" in str(n.args[2])]
    assert len(stochastic) == 6
    assert len({n.args[4] for n in stochastic}) == 6
    # the tensor itself is one: what differs is the draw
    assert len({n.args[0] for n in stochastic}) == 2


def test_nothing_equal_nothing_changed() -> None:
    graph, context = prepared(nn.Linear(64, 96))
    # W^T in dgrad is written as W's codes, decoded and transposed, also alone; after that the graph is final.
    ShareQuantized().run(graph, context)
    text = str(graph)
    assert not ShareQuantized().run(graph, context)
    assert str(graph) == text


@pytest.mark.parametrize("save_weights", [False, True])
@pytest.mark.parametrize("make", [QKV, MLP, lambda: nn.Linear(64, 40)], ids=["qkv", "mlp", "40 columns"])
def test_bitwise_neutral_and_idempotent(make: Any, save_weights: bool) -> None:
    graph, context = prepared(make(), save_weights=save_weights)
    inputs = gaussians(graph)
    expected = evaluate(graph, inputs)
    assert ShareQuantized().run(graph, context)
    assert equal(evaluate(graph, inputs), expected)
    text = str(graph)
    assert not ShareQuantized().run(graph, context)
    assert str(graph) == text
