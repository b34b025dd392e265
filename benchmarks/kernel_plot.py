"""Speed of the quantize kernels on an H200 as a share of a device copy of the bytes they move, drawn from the committed run.

``python -m benchmarks.kernel_plot`` draws results/gpu_kernels_h200.json into docs/plots/kernels.png and, where it exists,
results/gpu_rivals_h200.json (``benchmarks.gpu_rivals``) into docs/plots/rivals.png, and prints the tables of docs/kernels.md.
Nothing is measured.
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


def rival_bars(run: dict[str, Any]) -> tuple[list[str], dict[str, list[float]]]:
    """Labels of the operations and each competitor's shares, 0 where it has none. The amax is computed, or there is none; given
    where the run has nothing else.
    """
    rows = run[SIZE]["rows"]
    if any(row["amax"] == "computed" for row in rows):
        rows = [row for row in rows if row["amax"] != "given"]
    competitors = [{name: row.get(name, {}) for name in ("ours", "ours, scaled")} | row["rivals"] for row in rows]
    names = dict.fromkeys(name for found in competitors for name, entry in found.items() if "of copy" in entry)
    shares = {name: [found.get(name, {}).get("of copy", 0.0) for found in competitors] for name in names}
    return [row["case"].removesuffix(f", amax {row['amax']}") for row in rows], shares


def draw_rivals(run: dict[str, Any]) -> None:
    """Ours beside the rivals'. run: a result of ``benchmarks.gpu_rivals``."""
    from matplotlib.figure import Figure

    labels, shares = rival_bars(run)
    figure = Figure(figsize=(9.0, 0.62 * len(labels) + 1.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    thick = 0.8 / len(shares)
    for i, (name, values) in enumerate(shares.items()):
        rows = [row - 0.4 + (i + 0.5) * thick for row in range(len(labels))]
        texts = [f"{value:.2f}" if value else "" for value in values]
        axes.bar_label(axes.barh(rows, values, thick, label=name), texts, fontsize=7, padding=2)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, 1.08)
    axes.set_xlabel(f"share of a copy's speed, {run[SIZE]['copy, TB/s']:.2f} TB/s, bytes counted once")
    how = "computed" if any(row["amax"] == "computed" for row in run[SIZE]["rows"]) else "given"
    axes.set_title(f"{run['gpu']}, {SIZE} BF16, amax {how}")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(shares), frameon=False)
    save(figure, "rivals")


def share(speed: dict[str, Any], *passes: tuple[str, float], moved: float | None = None) -> float:
    """Of a copy's speed, of kernels one after the other. passes: names, bytes an element; moved: those of all, if fewer."""
    taken = sum(size / speed[name]["usual"]["of copy"] for name, size in passes)
    return (sum(size for _, size in passes) if moved is None else moved) / taken


def tables(run: dict[str, Any]) -> str:
    """The table of docs/kernels.md, and what follows from it."""
    sizes = [run["speed"][size] for size in (SIZE, "(4096, 11008)")]

    def cell(name: str) -> str:
        return ", ".join(f"{speed[name]['usual']['of copy']:.2f}".removeprefix("0") for speed in sizes)

    order = [(output, memory) for memory in ("", ", along dim 0") for output in ("decoded", "packed")]
    lines = [f"| {title} | {' | '.join(cell(f'{name} {o}{m}') for o, m in order)} |" for name, title in KERNELS.items()]
    lines += [f"{name}{m}: {cell(f'{name}{m}')}" for name in ("amax", "amax H16", "amax H128") for m in ("", ", along dim 0")]
    packed = 2 + 1 / 2 + 1 / 16
    for output, size in (("decoded", 4.0), ("packed", packed)):
        both = [share(speed, ("amax H128", 2), (f"ms_eden H128 {output}", size)) for speed in sizes]
        lines.append(f"MS-EDEN's two passes, {output}: {both[0]:.2f}, {both[1]:.2f}")
    names = ("nearest packed", packed), ("nearest packed, along dim 0", packed)
    two = [share(speed, *names, moved=2 * packed - 2) for speed in sizes]
    lines.append(f"both orientations packed, of what one read would move: {two[0]:.2f}, {two[1]:.2f}")
    return "\n".join(lines)


def main() -> None:
    kernels = json.loads((RESULTS / "gpu_kernels_h200.json").read_text())
    draw(kernels)
    print(tables(kernels))
    if (rivals := RESULTS / "gpu_rivals_h200.json").exists():
        draw_rivals(json.loads(rivals.read_text()))


if __name__ == "__main__":
    main()
