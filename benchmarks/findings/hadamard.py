"""A Hadamard rotation lowers MXFP4's error on outliers and raises NVFP4's.

    python -m benchmarks.findings.hadamard

Claims: AMD (2605.09825) rotates every MXFP4 operand by H16 and finds H32 no better; Quartet II (2601.22813) finds that a
rotation in the forward of NVFP4 hurts: blocks of 16 already isolate an outlier, and a rotation spreads it.
"""

from __future__ import annotations

from torch import Tensor

import fp4
from benchmarks.common import write
from benchmarks.findings.common import activations, save, single_thread

QUANTIZERS = {"MXFP4, even rule": fp4.MXFP4(scale_rule="even"), "NVFP4": fp4.NVFP4()}
ROTATIONS: dict[str, fp4.Rotation | None] = {
    "none": None,
    "H16, no signs": fp4.Rotation(16),
    "H16, fixed signs": fp4.Rotation(16, signs="fixed"),
    "H16, fresh signs": fp4.Rotation(16, signs="fresh"),
    "H32, fresh signs": fp4.Rotation(32, signs="fresh"),
    "H64, fresh signs": fp4.Rotation(64, signs="fresh"),
    "H128, fresh signs": fp4.Rotation(128, signs="fresh"),
}
DATA = ("N(0, 1)", "1 % of elements x20", "outlier tokens x20", "channel mean 3 sigma", "channel mean 10 sigma")


def relative_mse(x: Tensor, q: fp4.Quantizer, rotation: fp4.Rotation | None) -> float:
    """Squared error over squared norm of x (R, C), both in the rotated space."""
    return fp4.quantize(x, q, rotation=rotation, seed=1).error(x).relative_mse


def sweep(channels: int, tokens: int) -> dict[str, dict[str, dict[str, float]]]:
    """Quantizer -> data -> rotation -> relative MSE."""
    data = activations(channels, tokens)
    return {
        name: {kind: {r: relative_mse(data[kind], q, rotation) for r, rotation in ROTATIONS.items()} for kind in DATA}
        for name, q in QUANTIZERS.items()
    }


def draw(found: dict[str, dict[str, dict[str, float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained", dpi=110)
    axes = figure.subplots(2, 1, sharex=True)
    colors = ["black", "C0", "C9", "C2", "C1", "C3", "C4"]
    width = 0.8 / len(ROTATIONS)
    for axis, (name, by_data) in zip(axes, found.items(), strict=True):
        for i, rotation in enumerate(ROTATIONS):
            places = [j + (i - len(ROTATIONS) / 2 + 0.5) * width for j in range(len(DATA))]
            axis.bar(places, [by_data[d][rotation] for d in DATA], width * 0.9, color=colors[i], label=rotation)
        axis.set(title=name, ylabel="relative MSE")
        axis.set_xticks(range(len(DATA)), DATA)
        axis.tick_params(labelbottom=True)
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    save(figure, "hadamard")


def main() -> None:
    single_thread()
    found = sweep(512, 2048)
    draw(found)
    setting = "512 channels x 2048 tokens, quantized and rotated along the tokens, nearest rounding"
    write("findings_hadamard", {"setting": setting, "relative MSE": found})


if __name__ == "__main__":
    main()
