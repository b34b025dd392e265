"""Unbiased gradients: the error of the mean of B draws falls as B^-1/2 for SR and MS-EDEN, and stalls for nearest rounding.

    python -m benchmarks.findings.unbiased

One linear layer Y = X W^T, dY fixed, dX and dW computed B times. They are compared with the exact product of dY and of the
operands the GEMM reads, so that what forward quantization did to W and X is not counted: FP4 copies of the forward in
Quartet II (2601.22813) and NVIDIA's recipe (2509.25149, whose wgrad has its own nearest copy of X along the tokens), and the
BF16 originals in Amazon's (2502.20586).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fp4
from benchmarks.common import write
from benchmarks.findings.common import generator, operand, product, relative_error, save, single_thread

COUNTS = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Layer:
    """BF16 values of one linear layer: x (M, K), w (N, K), dy (M, N)."""

    x: Tensor
    w: Tensor
    dy: Tensor


@dataclass(frozen=True)
class Gradients:
    """The exact gradients, FP64, and a function that draws estimates of them (dX, dW) from a seed."""

    exact: tuple[Tensor, Tensor]
    draw: Callable[[Tensor], tuple[Tensor, Tensor]]


def layer(m: int = 512, n: int = 256, k: int = 256) -> Layer:
    g = generator(0)
    x, w, dy = (torch.randn(shape, generator=g).bfloat16() for shape in ((m, k), (n, k), (m, n)))
    return Layer(x, w, dy)


def _value(x: Tensor, q: fp4.Quantizer | None, rotation: fp4.Rotation | None = None) -> Tensor:
    """The deterministic copy that a GEMM reads, FP64."""
    decoded, scale = operand(x, q, rotation, None, 0)
    return decoded.double() if scale is None else decoded.double() * scale.double()


def quartet2(v: Layer, signs: str = "fresh") -> Gradients:
    """dY, and the decoded four_six copies of W and X, transposed: MS-EDEN, the same H128. signs: fresh, or fixed (wrong)."""
    eden, rotation = fp4.NVFP4(rounding="ms_eden"), fp4.Rotation(128, signs=signs)
    # Codes times block scales are BF16 numbers; the tensor scale is a factor of the GEMM's result.
    (x, x_scale), (w, w_scale) = (operand(t, fp4.NVFP4(four_six=True), None, None, 0) for t in (v.x, v.w))
    assert x_scale is not None
    assert w_scale is not None

    def draw(seed: Tensor) -> tuple[Tensor, Tensor]:
        dx = product(v.dy, w.t(), eden, eden, rotation, seed) * w_scale
        return dx, product(v.dy.t(), x.t(), eden, eden, rotation, seed) * x_scale

    dy = v.dy.double()
    return Gradients((dy @ (w.double() * w_scale), dy.t() @ (x.double() * x_scale)), draw)


def mxfp4_rht(v: Layer) -> Gradients:
    """All four operands from BF16: floor rule, 3/4 of the value, SR, the same H64 with fresh signs for the two of a GEMM."""
    q, rotation = fp4.MXFP4(rounding="stochastic", prescale=0.75), fp4.Rotation(64, signs="fresh")

    def draw(seed: Tensor) -> tuple[Tensor, Tensor]:
        dx = product(v.dy, v.w.t(), q, q, rotation, seed)
        return dx, product(v.dy.t(), v.x.t(), q, q, rotation, seed)

    dy = v.dy.double()
    return Gradients((dy @ v.w.double(), dy.t() @ v.x.double()), draw)


def nvfp4(v: Layer, dy_quantizer: fp4.NVFP4) -> Gradients:
    """NVIDIA's recipe: W 16x16 nearest; wgrad rotated by H16 with fixed signs, X nearest along the tokens; dY as given."""
    w, x, rotation = fp4.NVFP4(block=(16, 16)), fp4.NVFP4(), fp4.Rotation(16, signs="fixed")

    def draw(seed: Tensor) -> tuple[Tensor, Tensor]:
        dx = product(v.dy, v.w.t(), dy_quantizer, w, None, seed)
        return dx, product(v.dy.t(), v.x.t(), dy_quantizer, x, rotation, seed)

    dx = v.dy.double() @ _value(v.w.t(), w).t()
    return Gradients((dx, _value(v.dy.t(), None, rotation) @ _value(v.x.t(), x, rotation).t()), draw)


ARMS: dict[str, Callable[[Layer], Gradients]] = {
    "quartet2: MS-EDEN, H128 fresh": quartet2,
    "mxfp4_rht: 3/4, SR, H64 fresh": mxfp4_rht,
    "nvfp4: SR, range_guard": lambda v: nvfp4(v, fp4.NVFP4(rounding="stochastic", range_guard=True)),
    "nvfp4: SR, factor 6": lambda v: nvfp4(v, fp4.NVFP4(rounding="stochastic")),
    "MS-EDEN, H128 fixed signs": lambda v: quartet2(v, "fixed"),
    "nvfp4: dY nearest": lambda v: nvfp4(v, fp4.NVFP4()),
}


def mean_errors(found: Gradients, counts: tuple[int, ...] = COUNTS) -> dict[str, list[float]]:
    """Relative error of the mean of the first B draws, for each B of `counts`, by gradient."""
    totals = [torch.zeros_like(e) for e in found.exact]
    errors: dict[str, list[float]] = {"dX": [], "dW": []}
    for index in range(1, counts[-1] + 1):
        for total, part in zip(totals, found.draw(torch.tensor([index])), strict=True):
            total += part
        if index in counts:
            for name, total, exact in zip(errors, totals, found.exact, strict=True):
                errors[name].append(relative_error(total / index, exact))
    return errors


def slope(errors: list[float], counts: tuple[int, ...] = COUNTS) -> float:
    """Least-squares slope of log error against log B."""
    a, b = [math.log(c) for c in counts], [math.log(e) for e in errors]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    return sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True)) / sum((p - mean_a) ** 2 for p in a)


def plot(errors: dict[str, dict[str, list[float]]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(11, 5.6), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, gradient in zip(axes, ("dX", "dW"), strict=True):
        for style, (name, by_gradient) in zip(("C0o-", "C1s-", "C2^-", "C4v--", "C3D--", "kx-"), errors.items(), strict=True):
            axis.plot(COUNTS, by_gradient[gradient], style, label=name)
        axis.plot(COUNTS, [0.35 * b**-0.5 for b in COUNTS], ":", color="gray", label="slope -1/2")
        axis.set(title=gradient, xlabel="draws averaged, B", xscale="log", yscale="log")
        axis.xaxis.set_major_locator(FixedLocator(COUNTS))
        axis.yaxis.set_major_locator(FixedLocator([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3]))
        for direction in (axis.xaxis, axis.yaxis):
            direction.set_minor_locator(NullLocator())
            direction.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative error of the mean")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, "unbiased")


def main() -> None:
    single_thread()
    values = layer()
    errors = {name: mean_errors(arm(values)) for name, arm in ARMS.items()}
    plot(errors)
    rows = {
        name: {g: {"error": dict(zip(map(str, COUNTS), e, strict=True)), "slope": slope(e)} for g, e in by_gradient.items()}
        for name, by_gradient in errors.items()
    }
    setting = "M=512, N=256, K=256, X, W and dY N(0, 1) in BF16; FP32 products; relative error of the mean of B draws"
    write("findings_unbiased", {"setting": setting, "rows": rows})


if __name__ == "__main__":
    main()
