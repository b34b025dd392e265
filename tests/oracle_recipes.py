"""Eager models with the arithmetic of every recipe, written from the recipes' table with the oracle, not from the passes.

One plain ``torch.autograd.Function`` a linear. The draws' seed is the graph's: one ``torch.randint`` at the start of forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4.runtime import reference as r
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation

GEMMS = ("fprop", "dgrad", "wgrad")
FPROP, DGRAD, WGRAD = range(3)


@dataclass(frozen=True)
class Gemm:
    """Quantizers of the first operand (X, dY, dY^T) and the second (W, W^T, X^T), and their rotation.

    second_from, in the backward: "original"; "codes", fprop's own, transposed; "decoded", fprop's, transposed, quantized anew.
    """

    first: Quantizer | None = None
    second: Quantizer | None = None
    rotation: Rotation | None = None
    second_from: str = "original"

    @property
    def plain(self) -> bool:
        return self.first is None and self.second is None


@dataclass(frozen=True)
class Recipe:
    """masked: no gradient to what the forward clipped."""

    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    masked: bool = False


def nvfp4() -> Recipe:
    x, w, dy = NVFP4(), NVFP4(block=(16, 16)), NVFP4(rounding="stochastic")
    return Recipe(Gemm(x, w), Gemm(dy, w, None, "codes"), Gemm(dy, x, Rotation(16, signs="fixed")))


def quartet2() -> Recipe:
    forward, eden = NVFP4(four_six=True), NVFP4(rounding="ms_eden")
    backward = Gemm(eden, eden, Rotation(128, "fresh", bf16=False), "decoded")
    return Recipe(Gemm(forward, forward), backward, backward)


def quartet(gradient_rounding: str = "nearest", clip_gradient: bool = True) -> Recipe:
    forward, q = MXFP4(scale_rule="quest"), MXFP4(rounding=gradient_rounding, scale_rule="range_fit")
    backward = Gemm(q, q, Rotation(32, "fresh", bf16=False), "decoded")
    return Recipe(Gemm(forward, forward, Rotation(32, "none", bf16=False)), backward, backward, clip_gradient)


def mxfp4_h16(
    gemms: Collection[str] = GEMMS,
    rest: str = "fp8",
    signs: str = "none",
    size: int = 16,
    gradient_rounding: str = "nearest",
    rotate: str = "all",
) -> Recipe:
    """rest: what GEMMs outside of `gemms` are, "fp8", "mxfp8" or "bf16". rotate: "all", or "wgrad", with W in 32x32 blocks."""
    q = MXFP4(scale_rule="even")
    dy = q if gradient_rounding == "nearest" else MXFP4(rounding=gradient_rounding, scale_rule="even", allow_clipping=True)
    h = Rotation(size, signs, bf16=False)
    w, others = (q, h) if rotate == "all" else (MXFP4(block=(32, 32), scale_rule="even"), None)
    four = Recipe(Gemm(q, w, others), Gemm(dy, w, others), Gemm(dy, q, h))
    eight = {"fp8": fp8, "mxfp8": mxfp8, "bf16": Recipe}[rest]()
    return Recipe(**{name: getattr(four if name in gemms else eight, name) for name in GEMMS})


def all_the_way(scale: str = "e4m3", block: int = 16, tensor_scale: bool = True, phase: str = "") -> Recipe:
    """phase: "qaf" has the backward in BF16."""
    rne = NVFP4(block=(1, block), scale=scale, tensor_scale=tensor_scale)
    sr = NVFP4(block=(1, block), scale=scale, tensor_scale=tensor_scale, rounding="stochastic")
    return Recipe(Gemm(rne, rne)) if phase == "qaf" else Recipe(Gemm(rne, rne), Gemm(sr, rne), Gemm(sr, sr))


def mxfp4_rht() -> Recipe:
    q = MXFP4(rounding="stochastic", scale_rule="floor", prescale=0.75)
    backward = Gemm(q, q, Rotation(64, "fresh", bf16=False))
    return Recipe(Gemm(), backward, backward)


def tetrajet2() -> Recipe:
    forward, sr = NVFP4(outer=128), NVFP4(outer=128, rounding="stochastic")
    backward = Gemm(sr, sr, Rotation(16, "fresh", bf16=False), "decoded")
    return Recipe(Gemm(forward, forward), backward, backward)


def fp8() -> Recipe:
    q, w = FP8(block=(1, 128)), FP8(block=(128, 128))
    return Recipe(Gemm(q, w), Gemm(q, w, None, "codes"), Gemm(q, q))


def mxfp8() -> Recipe:
    return Recipe(Gemm(MXFP8(), MXFP8()), Gemm(MXFP8(), MXFP8()), Gemm(MXFP8(), MXFP8()))


def fp4_forward() -> Recipe:
    return Recipe(Gemm(NVFP4(four_six=True), NVFP4(four_six=True)))


def bf16() -> Recipe:
    return Recipe()


RECIPES: dict[str, Callable[..., Recipe]] = {
    f.__name__: f
    for f in (nvfp4, quartet2, quartet, mxfp4_h16, all_the_way, mxfp4_rht, tetrajet2, fp8, mxfp8, fp4_forward, bf16)
}


@dataclass(frozen=True)
class Operand:
    """What goes into a GEMM. value: (R, C), without `scale`, the tensor scale. mask: of what the quantizer did not clip."""

    value: Tensor
    scale: Tensor | None = None
    mask: Tensor | None = None


def operand(
    x: Tensor, q: Quantizer | None, rotation: Rotation | None, seed: Tensor, site: int, rotation_site: int, masked: bool = False
) -> Operand:
    """x (R, C), the contracted dimension last, rotated and quantized. site, rotation_site: draws of its rounding and signs."""
    if q is None:
        return Operand(x)
    if rotation is not None:
        x = r.rotate(x, rotation, seed, rotation_site)
    codes, scales, factor = r.quantize(x, q, None, seed, site)
    if q.has_outer_scale:
        value = r.dequantize(codes, scales, factor, q, x.shape[1], torch.float32)
    else:
        value = r.decode(codes, scales, q, x.shape[1], torch.bfloat16 if q.exact_in_bf16 else torch.float32)
    return Operand(value, factor if q.has_tensor_scale else None, r.clip_mask(x, scales, q) if masked else None)


def product(*factors: Tensor | None) -> Tensor | None:
    """The FP32 product, from left to right, of those that exist."""
    result = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else result * factor
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, seed: Tensor, index: int, recipe: Recipe) -> Tensor:
        gemm, x2 = recipe.fprop, x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        rotation_site = 16 * index + 8 + FPROP
        xq = operand(x2, gemm.first, gemm.rotation, seed, 16 * index + 2 * FPROP, rotation_site, recipe.masked)
        wq = operand(w, gemm.second, gemm.rotation, seed, 16 * index + 2 * FPROP + 1, rotation_site, recipe.masked)
        ctx.save_for_backward(x2, w, seed, xq.value, xq.scale, xq.mask, wq.value, wq.scale, wq.mask)
        ctx.index, ctx.recipe, ctx.bias = index, recipe, bias is not None
        if gemm.plain:
            return F.linear(x, w, bias)
        y = r.mm(xq.value, wq.value, product(xq.scale, wq.scale), bias, x.dtype)
        return y.reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x2, w, seed, xv, xs, xm, wv, ws, wm = ctx.saved_tensors
        dy2 = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _gradient(ctx, DGRAD, dy2, w, Operand(wv, ws), xm, seed).reshape(*dy.shape[:-1], w.shape[1])
        if ctx.needs_input_grad[1]:
            dw = _gradient(ctx, WGRAD, dy2.t(), x2, Operand(xv, xs), wm, seed)
        return dx, dw, dy2.sum(0) if ctx.bias else None, None, None, None


def _gradient(ctx: Any, role: int, dy: Tensor, other: Tensor, quantized: Operand, mask: Tensor | None, seed: Tensor) -> Tensor:
    """dY W, or dY^T X with `dy` transposed.

    other: W or X, quantized: as fprop had it. mask: fprop's, of the tensor whose gradient this is.
    """
    gemm: Gemm = getattr(ctx.recipe, GEMMS[role])
    if gemm.plain:
        return torch.mm(dy, other)
    site, rotation_site = 16 * ctx.index + 2 * role, 16 * ctx.index + 8 + role
    first = operand(dy, gemm.first, gemm.rotation, seed, site, rotation_site)
    if gemm.second_from == "codes":
        second, forward = Operand(quantized.value.t(), quantized.scale), None
    elif gemm.second_from == "decoded":
        second = operand(quantized.value.t(), gemm.second, gemm.rotation, seed, site + 1, rotation_site)
        forward = quantized.scale
    else:
        second, forward = operand(other.t(), gemm.second, gemm.rotation, seed, site + 1, rotation_site), None
    y = r.mm(first.value, second.value, product(first.scale, second.scale, forward), None, other.dtype)
    if mask is not None:
        y = r.apply_mask(y, mask)
    if gemm.second_from == "decoded" and ctx.recipe.fprop.rotation is not None:  # y is in fprop's rotated space
        rotation_site = 16 * ctx.index + 8 + FPROP
        y = r.unrotate(y, ctx.recipe.fprop.rotation, seed, rotation_site, other.shape[1], other.dtype)
    return y


class OracleLinear(nn.Module):
    """Stands for an ``nn.Linear`` and shares its parameters. `seed` is set by ``OracleModel`` before each forward."""

    seed: Tensor

    def __init__(self, linear: nn.Linear, index: int, recipe: Recipe) -> None:
        super().__init__()
        self.weight, self.bias, self.index, self.recipe = linear.weight, linear.bias, index, recipe

    def forward(self, x: Tensor) -> Tensor:
        w: Tensor = self.weight
        b: Tensor | None = self.bias
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, w, b = x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None
        with torch.autocast(device, enabled=False):
            return _Linear.apply(x, w, b, self.seed, self.index, self.recipe)


class OracleModel(nn.Module):
    """`model` with its quantized linears replaced.

    order: names of all linears in execution order, kept ones included. kept: those left as they are. recipe, flags: a name of
    RECIPES and its arguments.
    """

    def __init__(
        self, model: nn.Module, order: Iterable[str], kept: Iterable[str], recipe: str = "nvfp4", **flags: Any
    ) -> None:
        super().__init__()
        self.model = model
        kept = set(kept)
        self.linears: list[OracleLinear] = []
        for index, name in enumerate(order):
            if name in kept:
                continue
            parent, _, leaf = name.rpartition(".")
            owner = model.get_submodule(parent)
            oracle = OracleLinear(getattr(owner, leaf), index, RECIPES[recipe](**flags))
            setattr(owner, leaf, oracle)
            self.linears.append(oracle)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seed = torch.randint(0, 2**31 - 1, [1], device=self.linears[0].weight.device)
        for linear in self.linears:
            linear.seed = seed
        return self.model(*args, **kwargs)
