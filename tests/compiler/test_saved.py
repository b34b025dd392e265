"""What forward keeps for backward: packed codes in place of activations, and no second copy of a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import fp4
from fp4.compiler.graph import root
from tests.graphs import LLAMA_KEPT, MLP, Captured, llama, nbytes, rewritten, saved, tokens

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
FULL = fp4.recipe("bf16")
ROWS = 64


def shapes(nodes: list[Node], dtype: torch.dtype) -> list[tuple[int, ...]]:
    return sorted(tuple(n.meta["val"].shape) for n in nodes if n.meta["val"].dtype == dtype)


def activations(got: Captured) -> list[Node]:
    """The saved tensors that are no graph inputs."""
    return [n for n in saved(got) if n.op != "placeholder"]


def x(grad: bool = True) -> torch.Tensor:
    return torch.randn(2, ROWS // 2, 64, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


@pytest.mark.parametrize("autocast", [False, True])
def test_activations_are_kept_as_codes(autocast: bool) -> None:
    """X (M, K) goes to wgrad as codes (K, M / 2) and block scales (K, M / 16); nothing of X's own size and type is kept."""
    kept = activations(rewritten(MLP(), x(), policy=ALL, autocast=autocast))
    codes = [(k, ROWS // 2) for k in (64, 64, 96)]
    scales = [(k, ROWS // 16) for k in (64, 64, 96)]
    assert shapes(kept, torch.uint8) == sorted(codes + scales)
    floats = [n for n in kept if n.meta["val"].is_floating_point()]
    # Tensor scales of 3 activations, amax of 3 weights.
    assert [n.meta["val"].shape for n in floats] == [()] * 6


def test_the_same_graph_in_high_precision_keeps_the_activations() -> None:
    """What the test above would see had nothing been rewritten: X of the three linears, as BF16."""
    kept = activations(rewritten(MLP(), x(), policy=FULL, autocast=True))
    assert shapes(kept, torch.uint8) == []
    for size in ((ROWS, 64), (ROWS, 96)):  # some of them as a view's transpose
        assert size in shapes(kept, torch.bfloat16)


def test_bytes_of_the_linears_inputs() -> None:
    """4 bits a code, 8 bits a block of 16, 32 bits a tensor: 0.281 of BF16's 16 bits, and a little."""
    kept = activations(rewritten(MLP(), x(), policy=ALL, autocast=True))
    quantized = sum(nbytes(n) for n in kept if n.meta["val"].dtype == torch.uint8) + 3 * 4
    bf16 = sum(2 * ROWS * k for k in (64, 96, 64))
    assert quantized == sum(ROWS * k // 2 + ROWS * k // 16 for k in (64, 96, 64)) + 12
    assert 4.5 / 16 < quantized / bf16 <= 0.30


def _weight_copies(got: Captured) -> list[Node]:
    """Saved matrices computed from a parameter alone: nodes of the forward graph."""
    parameters = {linear.w.name for linear in got.linears} | {root(linear.w).name for linear in got.linears}

    def only_weight(node: Node) -> bool:
        if node.op == "placeholder":
            return node.name in parameters
        return bool(node.all_input_nodes) and all(only_weight(a) for a in node.all_input_nodes)

    return [n for n in activations(got) if n.meta["val"].dim() == 2 and only_weight(n)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [MLP, llama], ids=["mlp", "llama"])
def test_no_second_copy_of_a_weight(make: Any, autocast: bool) -> None:
    """The parameter lives anyway: backward quantizes it again."""
    given = x() if make is MLP else tokens()
    loss = (lambda y: y.float().sum()) if make is MLP else (lambda y: y.logits.float().sum())
    got = rewritten(make(), given, loss=loss, autocast=autocast, policy=ALL if make is MLP else None)
    copies = _weight_copies(got)
    # A linear left in BF16 keeps Inductor's own cast of its weight; the quantized ones keep none.
    kept = [n for n in got.linears if n.site.name in LLAMA_KEPT]
    allowed = {(site.site.n, site.site.k) for site in kept} | {(site.site.k, site.site.n) for site in kept}
    assert all(n.meta["val"].dtype == torch.bfloat16 and tuple(n.meta["val"].shape) in allowed for n in copies)
    assert len(copies) <= len(kept)


def test_save_weights_keeps_their_codes() -> None:
    """0.56 bytes a parameter, and the parameters themselves are no longer needed."""
    got = rewritten(MLP(), x(), policy=ALL, save_weights=True)
    sizes = [(96, 64), (64, 96), (64, 64)]
    expected = [(n, k // 2) for n, k in sizes] + [(n // 16, k // 16) for n, k in sizes]
    assert sorted(tuple(n.meta["val"].shape) for n in _weight_copies(got)) == sorted(expected)
    assert {n.meta["val"].dtype for n in _weight_copies(got)} == {torch.uint8}
    assert not [n for n in saved(got) if n.op == "placeholder"]


def test_llama_saves_less_than_bf16() -> None:
    sizes = {}
    for name, policy in (("fp4", fp4.recipe("nvfp4", high_precision_tail=0.0)), ("bf16", FULL)):
        got = rewritten(llama(), tokens(4, 64), policy=policy, autocast=True, loss=lambda y: y.logits.float().sum())
        sizes[name] = sum(nbytes(n) for n in activations(got))
    assert sizes["fp4"] < 0.9 * sizes["bf16"]


def test_checkpointed_block_saves_inputs_only() -> None:
    """Quantized tensors of a checkpointed region are recomputed: saving them would silently defeat checkpointing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.mlp, x, use_reentrant=False)

    kept = activations(rewritten(Block(), x(), policy=ALL))
    assert [n for n in kept if n.meta["val"].numel() > 1] == []


def test_codes_read_by_fprop_and_wgrad_are_saved_as_codes() -> None:
    """Square blocks on X: one set of codes for both products. CSE would merge their decodes and save that, in BF16."""
    square = fp4.Operand(fp4.NVFP4(block=(16, 16)))
    gemm = fp4.GemmPrecision(square, square)
    kept = activations(rewritten(MLP(), x(), policy=fp4.Policy("square", fp4.LinearPrecision(gemm, gemm, gemm))))
    assert shapes(kept, torch.bfloat16) == []
    assert shapes(kept, torch.uint8) == sorted(
        [(ROWS, k // 2) for k in (64, 96, 64)] + [(ROWS // 16, k // 16) for k in (64, 96, 64)]
    )
