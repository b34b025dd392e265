"""Which ExMy format for the scale of a block of 16? Figure 1 of FP4 All the Way (2505.19115) on synthetic data.

    python -m benchmarks.findings.scale_formats

Values are N(0, 1) times an amplitude for each block of 16, lognormal: sigma 0 is plain Gaussian, 2.5 has the spread of a
gradient. The mean over blocks of each block's relative MSE counts a flushed block as 1 however small it is; the
energy-weighted error is that of the whole tensor. E8M0 has no column with a tensor scale: NVFP4 refuses it, since it has
FP32's own range. As a scale of NVFP4 it is amax / 6 rounded to the nearest power of two, which clips; MXFP4's even rule, in
blocks of 32, is beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fp4
from benchmarks.common import write
from benchmarks.findings.common import generator, save, single_thread

FORMATS = ("e1m6", "e2m5", "e3m4", "e4m3", "e5m2", "e6m1", "e8m0", "ue5m3")
MX = "MXFP4 even, block 32"
SIGMAS = (0.0, 1.0, 2.5)
# Name -> (tensor scale, factor on the values). Without a tensor scale the format's own range decides.
VARIANTS = {
    "tensor scale": (True, 1.0),
    "no tensor scale, values near 1": (False, 1.0),
    "no tensor scale, values near 2^-14": (False, 2.0**-14),
}
TENSORS = 16  # the energy of a wide lognormal is in a few blocks, so one tensor says little
METRICS = ("mean over blocks", "energy-weighted")


def data(sigma: float, index: int = 0, blocks: int = 4096) -> Tensor:
    """(64, blocks / 4): each block of 16 along the last dimension has its own lognormal amplitude, median 1."""
    g = generator(index)
    amplitude = torch.exp(sigma * torch.randn(blocks, 1, generator=g))
    return (amplitude * torch.randn(blocks, 16, generator=g)).reshape(64, -1)


def errors(x: Tensor, q: fp4.Quantizer) -> dict[str, float]:
    """Relative MSE of blocks of 16: the mean over blocks, and of the whole tensor."""
    decoded = fp4.quantize(x, q).dequantize(torch.float32)
    squared = ((decoded - x).double() ** 2).reshape(-1, 16).sum(1)
    norm = (x.double() ** 2).reshape(-1, 16).sum(1)
    return {METRICS[0]: float((squared / norm).mean()), METRICS[1]: float(squared.sum() / norm.sum())}


def mean_errors(sigma: float, factor: float, q: fp4.Quantizer, tensors: int = TENSORS) -> dict[str, float]:
    """`errors` of factor * data(sigma), mean over tensors."""
    found = [errors(data(sigma, i) * factor, q) for i in range(tensors)]
    return {metric: sum(f[metric] for f in found) / tensors for metric in METRICS}


def sweep() -> dict[str, dict[str, dict[str, dict[str, float]] | None]]:
    """Format -> variant -> sigma -> the two errors; None where the type refuses the variant."""
    found: dict[str, dict[str, dict[str, dict[str, float]] | None]] = {}
    for name in (*FORMATS, MX):
        found[name] = {}
        for variant, (tensor_scale, factor) in VARIANTS.items():
            if name in ("e8m0", MX) and tensor_scale:
                found[name][variant] = None
                continue
            q = fp4.MXFP4(scale_rule="even") if name == MX else fp4.NVFP4(scale=name, tensor_scale=tensor_scale)
            found[name][variant] = {f"sigma {s:g}": mean_errors(s, factor, q) for s in SIGMAS}
    return found


def draw(found: dict[str, dict[str, dict[str, dict[str, float]] | None]]) -> None:
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    columns = [(variant, f"sigma {s:g}") for variant in VARIANTS for s in SIGMAS]
    figure = Figure(figsize=(11, 10), layout="constrained", dpi=110)
    axes = figure.subplots(2, 1)
    for axis, metric in zip(axes, METRICS, strict=True):
        cells = [[(found[f][v] or {}).get(s, {}).get(metric, np.nan) for v, s in columns] for f in found]
        image = axis.imshow(cells, norm=LogNorm(6e-3, 1), cmap="YlOrRd", aspect="auto")
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                text = "none" if np.isnan(value) else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"
                axis.text(j, i, text, ha="center", va="center", fontsize=10, color="white" if value > 0.15 else "black")
        axis.set_yticks(range(len(found)), [f.upper() if f in FORMATS else f for f in found])
        axis.set_xticks(range(len(columns)), [s for _, s in columns])
        for i, variant in enumerate(VARIANTS):
            axis.text(3 * i + 1, -0.65, variant, ha="center", va="bottom", fontsize=10)
            axis.axvline(3 * i - 0.5, color="white", linewidth=4)
        axis.set_title(f"relative MSE, {metric}", pad=22, fontweight="bold")
        axis.set_xlabel("spread of the block amplitudes (lognormal)")
        figure.colorbar(image, ax=axis, label="relative MSE", extend="max")
    save(figure, "scale_formats")


def main() -> None:
    single_thread()
    found = sweep()
    draw(found)
    setting = "N(0, 1) times a lognormal amplitude of each block of 16; mean over 16 tensors of 2^16 values; E2M1, nearest"
    write("findings_scale_formats", {"setting": setting, "relative MSE": found})


if __name__ == "__main__":
    main()
