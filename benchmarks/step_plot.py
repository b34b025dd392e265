"""A training step's time on an H200 over compiled BF16's, drawn from the committed run of ``benchmarks.gpu_step``.

``python -m benchmarks.step_plot`` draws results/gpu_step_h200.json into docs/plots/step.png: one linear, ours beside what
anyone writes in an afternoon, and a decoder under every recipe. It prints the tables of docs/kernels.md. Nothing is measured.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.findings.common import save
from benchmarks.gpu_step import ONE_THREAD

MODES = {"": "as it comes", ONE_THREAD: "backward in forward's thread", ", CUDA graphs": "CUDA graphs"}
RIVALS = {"nvfp4": "nvfp4", "plain": "six operands, nearest"}
COLUMNS = ("nvfp4", "rival's nvfp4", "plain", "rival's plain", "quartet2", "mxfp4_h16", "mxfp4_h16, FP8", "mxfp8")
EARLIER = ", of an earlier run"
LONG = 1.5  # recipes beyond are named below the plot: their emulated products are in FP32
OURS, THEIRS, TIME, MEMORY = "#5b8fd6", "#d1622b", "#5b8fd6", "#ecb394"


def steps(run: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Recipe -> time and peak memory of the decoder's step over BF16's of the same run."""
    found = {}
    for part in ("model", *(part for part in run if part.endswith(EARLIER))):
        base, *rows = run[part]
        for row in rows:
            name = row["recipe"] + ("" if row["exact"] else ", `exact=False`")
            found[name] = row["ms"] / base["ms"], row["peak GiB"] / base["peak GiB"]
    return found


def draw(run: dict[str, Any]) -> None:
    """run: a result of ``benchmarks.gpu_step``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 8.4), layout="constrained", dpi=120)
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    labels, ours, theirs = [], [], []
    for linear in run["linear"]:
        for recipe, title in RIVALS.items():
            for mode, how in MODES.items():
                if mode != ONE_THREAD or linear is run["linear"][0]:  # larger ones do not wait for the host
                    labels.append(f"{linear['K']} x {linear['N']}, {title}, {how}")
                    ours.append(linear["over bf16"][recipe + mode])
                    theirs.append(linear["over bf16"][f"rival's {recipe}{mode}"])
    for i, (name, values, color) in enumerate((("ours", ours, OURS), ("an afternoon's\nfake quantizer", theirs, THEIRS))):
        rows = [row + (i - 0.5) * 0.4 for row in range(len(labels))]
        upper.bar_label(upper.barh(rows, values, 0.4, label=name, color=color), fmt="{:.2f}", fontsize=7, padding=2)
    upper.set_yticks(range(len(labels)), labels, fontsize=8)
    upper.set_title(f"{run['gpu']}: one linear, forward and backward, 16384 tokens")
    upper.set_xlabel("over compiled BF16 in the same run and mode")
    upper.set_xlim(0, 1.08 * max(theirs))
    found = steps(run)
    shown = {name: both for name, both in found.items() if both[0] < LONG}
    for i, (name, color) in enumerate((("time", TIME), ("peak memory", MEMORY))):
        rows = [row + (i - 0.5) * 0.4 for row in range(len(shown))]
        bars = lower.barh(rows, [both[i] for both in shown.values()], 0.4, label=name, color=color)
        lower.bar_label(bars, fmt="{:.2f}", fontsize=7, padding=2)
    lower.set_yticks(range(len(shown)), [name.replace("`", "") for name in shown], fontsize=8)
    lower.set_title("a decoder's step, 16 layers, 2048 wide, 16384 tokens")
    left = ", ".join(f"{name} {time:.1f}" for name, (time, _) in found.items() if name not in shown)
    lower.set_xlabel(f"over compiled BF16 in the same run (beyond the axis: {left})")
    for axes in (upper, lower):
        axes.axvline(1.0, color="#888888", linewidth=1)
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    save(figure, "step")


def tables(run: dict[str, Any]) -> str:
    def number(value: float) -> str:
        return f"{value:.2f}".removeprefix("0")

    lines = []
    for linear in run["linear"]:
        over = linear["over bf16"]
        cells = [f"{number(over[c])}, {number(over[f'{c}, CUDA graphs'])}" for c in COLUMNS]
        lines.append(f"| {linear['K']} x {linear['N']} | {' | '.join(cells)} |")
        shares = linear["overhead over the rival's"]
        lines.append(f"  of what the rival adds: {', '.join(f'{name} {number(share)}' for name, share in shares.items())}")
    lines += [f"| {name} | {number(time)} | {number(memory)} |" for name, (time, memory) in steps(run).items()]
    return "\n".join(lines)


def main() -> None:
    run = json.loads((RESULTS / "gpu_step_h200.json").read_text())
    draw(run)
    print(tables(run))


if __name__ == "__main__":
    main()
