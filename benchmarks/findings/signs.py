"""Deterministic against fresh signs on wgrad, MXFP4: equal in one draw, and fresh signs average out.

    python -m benchmarks.findings.signs

AMD (2605.09825) reports that a deterministic H16 makes wgrad in MXFP4 converge where random signs and stochastic rounding
do not. dW = dY^T X of one batch is computed 24 times, and the error of the mean followed. Over training steps the signs are
drawn anew, so what averages out here is noise there, and what stays is a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fp4
from benchmarks.common import write
from benchmarks.findings.common import activations, generator, product, relative_error, save, single_thread

DRAWS = 24
DATA = ("N(0, 1)", "outlier tokens x20", "channel mean 3 sigma", "channel mean 10 sigma, outlier tokens")


@dataclass(frozen=True)
class Arm:
    quantizer: fp4.Quantizer
    rotation: fp4.Rotation | None

    @property
    def random(self) -> bool:
        return self.quantizer.needs_seed or (self.rotation is not None and self.rotation.needs_seed)


RNE = fp4.MXFP4(scale_rule="even")
# On this rule stochastic rounding clips the values between 6 and 7: it is not quite unbiased.
SR = fp4.MXFP4(scale_rule="even", rounding="stochastic", allow_clipping=True)
ARMS = {
    "RNE": Arm(RNE, None),
    "RNE, H16 no signs": Arm(RNE, fp4.Rotation(16)),
    "RNE, H16 fixed signs": Arm(RNE, fp4.Rotation(16, signs="fixed")),
    "RNE, H16 fresh signs": Arm(RNE, fp4.Rotation(16, signs="fresh")),
    "SR": Arm(SR, None),
    "SR, H16 fresh signs": Arm(SR, fp4.Rotation(16, signs="fresh")),
}


def gradient(outputs: int, tokens: int) -> Tensor:
    """dY^T (outputs, tokens): N(0, 1) times a lognormal amplitude (sigma .7) of each element, heavier-tailed than Gaussian."""
    g = generator(1)
    return torch.randn(outputs, tokens, generator=g) * torch.exp(0.7 * torch.randn(outputs, tokens, generator=g))


def mean_errors(dy: Tensor, x: Tensor, arm: Arm, draws: int = DRAWS) -> list[float]:
    """Relative error of the mean of 1, 2, ..., `draws` draws of dW. dy: (N, T), x: (K, T). One draw when nothing is random."""
    exact = dy.double() @ x.double().t()
    total, found = torch.zeros_like(exact), []
    for draw in range(draws if arm.random else 1):
        total += product(dy, x, arm.quantizer, arm.quantizer, arm.rotation, torch.tensor([draw]))
        found.append(relative_error(total / (draw + 1), exact))
    return found


def plot(found: dict[str, dict[str, list[float]]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(11, 8), layout="constrained", dpi=110)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    styles = ["k-", "C0-", "C9--", "C2o-", "C1s-", "C3^-"]
    for axis, (kind, arms) in zip(axes.flat, found.items(), strict=True):
        for (name, errors), style in zip(arms.items(), styles, strict=True):
            if len(errors) == 1:
                axis.plot([1, DRAWS], errors * 2, style, label=name)
            else:
                axis.plot(range(1, len(errors) + 1), errors, style, markersize=4, label=name)
        axis.set(title=kind, xscale="log", yscale="log")
        axis.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8, 16, 24]))
        axis.yaxis.set_major_locator(FixedLocator([0.03, 0.05, 0.1, 0.2, 0.3]))
        for direction in (axis.xaxis, axis.yaxis):
            direction.set_minor_locator(NullLocator())
            direction.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("draws averaged")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error of the mean of dW")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, "signs")


def main() -> None:
    single_thread()
    dy, data = gradient(256, 2048), activations(256, 2048)
    found = {kind: {name: mean_errors(dy, data[kind], arm) for name, arm in ARMS.items()} for kind in DATA}
    plot(found)
    summary = {
        kind: {name: {"one draw": e[0], f"mean of {DRAWS}": e[-1]} for name, e in arms.items()} for kind, arms in found.items()
    }
    setting = "dW = dY^T X, 2048 tokens contracted, 256 x 256; MXFP4, even rule; the first of the draws is 'one draw'"
    write("findings_signs", {"setting": setting, "relative error of dW": summary, "error by number of draws": found})


if __name__ == "__main__":
    main()
