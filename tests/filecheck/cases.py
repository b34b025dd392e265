"""The small models whose graphs the golden checks describe: the shapes of linears a compiler gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp4
from tests.graphs import MLP

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
HEADS_KEPT = fp4.recipe("nvfp4", high_precision_tail=0.0)


class Attention(nn.Module):
    """q, k and v read one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 32)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.mix = nn.Linear(64, 64, bias=False)
        self.lm_head = nn.Linear(64, 128, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.mix(self.embed(tokens)))


class Frozen(nn.Module):
    """The first linear's weight is frozen; its input has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)
        self.a.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Experts(nn.Module):
    """A router and two experts that every token visits, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum((weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)), torch.zeros(()))


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


def _x(*shape: int, gradient: bool = True) -> Tensor:
    return torch.empty(*shape, requires_grad=gradient)


def _inference() -> fp4.Explanation:
    with torch.no_grad():
        return _explain(MLP(), _x(32, 64))


def _explain(model: nn.Module, x: Tensor, policy: fp4.Policy = ALL, **how: Any) -> fp4.Explanation:
    return fp4.explain(model, x, policy=policy, **how)


CASES: dict[str, Callable[[], fp4.Explanation]] = {
    "mlp": lambda: _explain(MLP(), _x(32, 64)),
    "attention": lambda: _explain(Attention(), _x(2, 16, 64)),
    "tied": lambda: _explain(Tied(), torch.empty(2, 16, dtype=torch.int64), HEADS_KEPT),
    "autocast": lambda: _explain(MLP(), _x(32, 64), autocast=torch.bfloat16),
    "bias": lambda: _explain(nn.Linear(64, 96), _x(32, 64)),
    "frozen": lambda: _explain(Frozen(), _x(32, 64)),
    "inference": _inference,
    "moe": lambda: _explain(MoE(), _x(32, 64), HEADS_KEPT),
}
