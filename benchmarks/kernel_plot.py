"""Speed of the quantize kernels on an H200 as a share of a device copy of the bytes they move, drawn from the committed run.

``python -m benchmarks.kernel_plot`` draws results/gpu_kernels_h200.json into docs/plots/kernels.png. Nothing is measured.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.findings.common import save

SIZE = "(16384, 4096)"
KERNELS = {
    "nearest": "NVFP4 nearest",
    "nearest 16x16": "NVFP4 16x16",
    "nearest H16": "NVFP4 nearest, H16",
    "nearest H128": "NVFP4 nearest, H128",
    "stochastic": "NVFP4 stochastic",
    "stochastic H16": "NVFP4 stochastic, H16",
    "four_six": "NVFP4 four_six",
    "ms_eden H128": "NVFP4 MS-EDEN, H128",
    "mxfp4 floor": "MXFP4 floor",
}
SERIES = (
    ("decoded", "", "#5b8fd6"),
    ("packed", "", "#d1622b"),
    ("decoded", ", along dim 0", "#a9c5ea"),
    ("packed", ", along dim 0", "#ecb394"),
)
THICK = 0.2


def draw(run: dict[str, Any]) -> None:
    """Bars of each kernel: decoded and packed, along rows and along tokens. run: a result of ``benchmarks.gpu_kernels``."""
    from matplotlib.figure import Figure

    speed = run["speed"][SIZE]
    figure = Figure(figsize=(9.0, 7.2), layout="constrained", dpi=120)
    axes = figure.subplots()
    for i, (output, memory, color) in enumerate(SERIES):
        shares = [speed[f"{name} {output}{memory}"]["usual"]["of copy"] for name in KERNELS]
        rows = [row + (i - 1.5) * THICK for row in range(len(KERNELS))]
        label = output + (", along tokens" if memory else "")
        axes.bar_label(axes.barh(rows, shares, THICK, label=label, color=color), fmt="{:.2f}", fontsize=7, padding=2)
    axes.set_yticks(range(len(KERNELS)), list(KERNELS.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08)
    axes.set_xlabel(f"share of a copy's speed, {speed['copy, TB/s']:.2f} TB/s")
    axes.set_title(f"{run['gpu']}, {SIZE} BF16, amax given")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(SERIES), frameon=False)
    save(figure, "kernels")


def main() -> None:
    draw(json.loads((RESULTS / "gpu_kernels_h200.json").read_text()))


if __name__ == "__main__":
    main()
