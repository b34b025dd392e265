"""An eager model with the nvfp4 recipe's arithmetic, written from the recipe's table with the oracle, not from the passes.

One plain ``torch.autograd.Function`` a linear. The draws' seed is the graph's: one ``torch.randint`` at the start of forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp4.runtime import reference as r
from fp4.runtime.spec import NVFP4, Rotation

X = NVFP4()
W = NVFP4(block=(16, 16))
DY = NVFP4(rounding="stochastic")
H16 = Rotation(16, signs="fixed")


def _decoded(x: Tensor, q: NVFP4, seed: Tensor | None = None, site: int = 0) -> tuple[Tensor, Tensor]:
    codes, scales, tensor_scale = r.quantize(x, q, None, seed, site)
    return r.decode(codes, scales, q, x.shape[1], torch.bfloat16), tensor_scale


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, seed: Tensor, index: int) -> Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        xq, tx = _decoded(x2, X)
        wq, tw = _decoded(w, W)
        xt, txt = _decoded(r.rotate(x2.t(), H16, None, 0), X)
        ctx.save_for_backward(wq, tw, xt, txt, seed)
        ctx.index, ctx.dtype, ctx.bias = index, x.dtype, bias is not None
        return r.mm(xq, wq, tx * tw, bias, x.dtype).reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wq, tw, xt, txt, seed = ctx.saved_tensors
        dy2 = dy.reshape(-1, dy.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            d, td = _decoded(dy2, DY, seed, 16 * ctx.index + 2)
            dx = r.mm(d, wq.t(), td * tw, None, ctx.dtype).reshape(*dy.shape[:-1], wq.shape[1])
        if ctx.needs_input_grad[1]:
            d, td = _decoded(r.rotate(dy2.t(), H16, None, 0), DY, seed, 16 * ctx.index + 4)
            dw = r.mm(d, xt, td * txt, None, ctx.dtype)
        return dx, dw, dy2.sum(0) if ctx.bias else None, None, None


class OracleLinear(nn.Module):
    """Stands for an ``nn.Linear`` and shares its parameters. `seed` is set by ``OracleModel`` before each forward."""

    seed: Tensor

    def __init__(self, linear: nn.Linear, index: int) -> None:
        super().__init__()
        self.weight, self.bias, self.index = linear.weight, linear.bias, index

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight, self.bias
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, w, b = x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None
        with torch.autocast(device, enabled=False):
            return _Linear.apply(x, w, b, self.seed, self.index)


class OracleModel(nn.Module):
    """`model` with its quantized linears replaced. order: names of all linears in execution order, kept ones included."""

    def __init__(self, model: nn.Module, order: Iterable[str], kept: Iterable[str]) -> None:
        super().__init__()
        self.model = model
        kept = set(kept)
        self.linears = []
        for index, name in enumerate(order):
            if name in kept:
                continue
            parent, _, leaf = name.rpartition(".")
            owner = model.get_submodule(parent)
            oracle = OracleLinear(getattr(owner, leaf), index)
            setattr(owner, leaf, oracle)
            self.linears.append(oracle)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seed = torch.randint(0, 2**31 - 1, [1], device=self.linears[0].weight.device)
        for linear in self.linears:
            linear.seed = seed
        return self.model(*args, **kwargs)
