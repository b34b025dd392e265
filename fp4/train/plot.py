"""The picture of a run: loss curves, and the gap to BF16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fp4.train.results import BASELINE, window


def smooth(values: Any, width: int) -> np.ndarray:
    """Mean of each `width` consecutive values: (n,) to (n - width + 1,)."""
    return np.convolve(np.asarray(values, dtype=np.float64), np.full(width, 1 / width), mode="valid")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the results of a run as a PNG: on the left the losses (a step's faint, smoothed, evaluations as points), on the
    right, when BF16 is among the recipes, the smoothed difference of the training losses to it, in nats. Draws nothing
    for a run without a step.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    recipes = {name: entry for name, entry in results["recipes"].items() if entry["losses"]}
    if not recipes:
        return
    base = recipes.get(BASELINE)
    others = [name for name in recipes if name != BASELINE]
    panels = 2 if base and others else 1
    figure = Figure(figsize=(6.4 * panels, 4.4), layout="constrained", dpi=120)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    colors = [*colormaps["tab10"].colors, *colormaps["Dark2"].colors]  # type: ignore[attr-defined]
    for i, (name, entry) in enumerate(recipes.items()):
        losses, color = entry["losses"], colors[i % len(colors)]
        width = min(window(results["settings"]["steps"]), len(losses))
        axes[0].plot(range(1, len(losses) + 1), losses, color=color, alpha=0.2, linewidth=0.8)
        axes[0].plot(range(width, len(losses) + 1), smooth(losses, width), color=color, label=f"{name}, training")
        if entry["evals"]:
            axes[0].plot(*zip(*entry["evals"], strict=True), "o", color=color, markersize=4, label=f"{name}, held-out text")
        for step, phase in entry.get("phases", []):
            for axis in axes:
                axis.axvline(step, color=color, linestyle=":", label=f"{name}, phase {phase}" if axis is axes[0] else None)
        if base is None or name == BASELINE:
            continue
        both = min(len(losses), len(base["losses"]))
        gap = np.subtract(losses[:both], base["losses"][:both])
        width = min(width, both)
        axes[1].plot(range(width, both + 1), smooth(gap, width), color=color, label=f"{name} - {BASELINE}")
    axes[0].set(title=_title(results), xlabel="step", ylabel="loss (nats a token)")
    if panels == 2:
        steps = window(results["settings"]["steps"])
        axes[1].axhline(0, color="black", linewidth=0.8)
        axes[1].set(title=f"gap to BF16, mean of {steps} steps", xlabel="step", ylabel="nats a token")
    crowded = len(recipes) > 4  # then one legend, beside the panels, of the training curves
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if not crowded:
            axis.legend()
    if crowded:
        handles = [h for h in axes[0].get_lines() if str(h.get_label()).endswith(", training")]
        names = [str(h.get_label()).removesuffix(", training") for h in handles]
        figure.legend(handles, names, loc="outside right upper", title="points: held-out text")
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png")
    os.replace(part, path)


def _title(results: dict[str, Any]) -> str:
    s, entry = results["settings"], next(iter(results["recipes"].values()))
    size = f"{entry['parameters'] / 1e6:.1f}M parameters, {s['layers']} layers of {s['hidden']}"
    return f"Llama, {size}, {s['batch']} x {s['seq']} tokens a step"
