"""What the findings share: data, products of quantized operands, relative errors, figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4.runtime import reference
from fp4.runtime.spec import Quantizer, Rotation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS = Path(__file__).parents[2] / "docs" / "plots"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def activations(channels: int, tokens: int) -> dict[str, Tensor]:
    """Activations as the wgrad GEMM reads them, (channels, tokens) FP32 with the tokens contracted, by kind.

    A channel mean of m sigma is drawn from N(0, m^2) for each channel and is the same for all its tokens. Outlier tokens
    are 1 in 128, 20 times as large in every channel, mean included.
    """
    g = generator(0)
    noise = torch.randn(channels, tokens, generator=g)
    mean = torch.randn(channels, 1, generator=g)
    element = torch.where(torch.rand(channels, tokens, generator=g) < 0.01, 20.0, 1.0)
    token = torch.ones(tokens)
    token[torch.randperm(tokens, generator=g)[: tokens // 128]] = 20.0
    return {
        "N(0, 1)": noise,
        "1 % of elements x20": noise * element,
        "outlier tokens x20": noise * token,
        "channel mean 3 sigma": noise + 3 * mean,
        "channel mean 10 sigma": noise + 10 * mean,
        "channel mean 10 sigma, outlier tokens": (noise + 10 * mean) * token,
    }


def operand(
    x: Tensor, q: Quantizer | None, rotation: Rotation | None, seed: Tensor | None, site: int
) -> tuple[Tensor, Tensor | None]:
    """One operand (R, C) of a product as its GEMM reads it: decoded without the tensor scale, and that scale.

    Signs are drawn at site 0, so that both operands share them; a quantizer's draws at `site`. q None: not quantized.
    """
    if rotation is not None:
        x = reference.rotate(x, rotation, seed, 0)
    if q is None:
        return x, None
    codes, scales, tensor_scale = reference.quantize(x, q, None, seed, site)
    return reference.decode(codes, scales, q, x.shape[1], torch.float32), tensor_scale


def product(
    a: Tensor,
    b: Tensor,
    qa: Quantizer | None,
    qb: Quantizer | None,
    rotation: Rotation | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """a b^T of the two operands, rotated alike and quantized: (M, K) and (N, K) to (M, N) FP32."""
    (left, scale_a), (right, scale_b) = operand(a, qa, rotation, seed, 1), operand(b, qb, rotation, seed, 2)
    alpha = scale_a * scale_b if scale_a is not None and scale_b is not None else scale_a if scale_b is None else scale_b
    return reference.mm(left, right, alpha, None, torch.float32)


def relative_error(estimate: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over the norm of `exact`; sums in FP64."""
    exact = exact.double()
    return float((estimate.double() - exact).norm() / exact.norm())


def single_thread() -> None:
    """One thread: the figures are then the same on any number of cores, since FP32 GEMMs add in one order."""
    torch.set_num_threads(1)


def save(figure: Figure, name: str) -> None:
    """Write the figure to docs/plots/NAME.png."""
    PLOTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOTS / f"{name}.png", format="png")
