"""The sqrt(3) rule of FP4 All the Way (2505.19115) on its toy: gradient descent on a quadratic under Gaussian gradient noise.

    python -m benchmarks.findings.quadratic

L(w) = lambda |w|^2 / 2 with d coordinates, w <- w - eta (grad + sigma eps), eps ~ N(0, I), sigma = k sigma_c and
sigma_c = |grad| / sqrt(3 d), followed at every step. In expectation a step changes the loss by
-eta |grad|^2 (1 - eta lambda (1 + k^2 / 3) / 2), that is by the factor of `expected_factor`. There is no quantizer in it: the
rule is about noise of a given size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.common import write
from benchmarks.findings.common import generator, save, single_thread

NOISES = (2.0, 1.0, 0.5)
STEP_SIZES = (1.0, 0.5)  # eta * lambda
STEPS = 40


def expected_factor(noise: float, step_size: float) -> float:
    """E[L after a step] / L before, for sigma = `noise` sigma_c and eta lambda = `step_size`."""
    return 1 - 2 * step_size * (1 - step_size * (1 + noise**2 / 3) / 2)


def descend(noise: float, step_size: float, steps: int = STEPS, dimension: int = 4096) -> list[float]:
    """Loss over the first loss after 0, 1, ..., `steps` steps."""
    g = generator(0)
    w = torch.randn(dimension, generator=g, dtype=torch.float64)  # lambda is 1, so the gradient is w
    first = float(w @ w)
    losses = [1.0]
    for _ in range(steps):
        sigma = noise * float(w.norm()) / math.sqrt(3 * dimension)
        w = w - step_size * (w + sigma * torch.randn(dimension, generator=g, dtype=torch.float64))
        losses.append(float(w @ w) / first)
    return losses


def row(losses: list[float], noise: float, step_size: float) -> dict[str, float]:
    """Measured and expected: the loss's factor a step, and the descent a step over that without noise."""
    factor, expected = losses[-1] ** (1 / (len(losses) - 1)), expected_factor(noise, step_size)
    noiseless = 1 - expected_factor(0.0, step_size)
    return {
        "factor a step": factor,
        "expected factor": expected,
        "descent over noise-free": (1 - factor) / noiseless,
        "expected descent over noise-free": (1 - expected) / noiseless,
        f"loss after {len(losses) - 1} steps": losses[-1],
    }


def plot(losses: dict[float, dict[float, list[float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, step_size in zip(axes, STEP_SIZES, strict=True):
        for color, noise in zip(("C3", "C1", "C0"), NOISES, strict=True):
            axis.plot(losses[step_size][noise], "o", color=color, markersize=4, label=f"k = {noise:g}, run")
            factor = expected_factor(noise, step_size)
            axis.plot([factor**i for i in range(STEPS + 1)], color=color, linewidth=1, label=f"k = {noise:g}, expectation")
        if step_size < 1:
            factor = expected_factor(0.0, step_size)
            axis.plot([factor**i for i in range(STEPS + 1)], "k:", label="no noise")
        axis.set(title=f"eta lambda = {step_size:g}", xlabel="step", yscale="log", ylim=(1e-26, 1e6))
        axis.tick_params(labelleft=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss over first loss")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    save(figure, "quadratic")


def main() -> None:
    single_thread()
    losses = {s: {k: descend(k, s) for k in NOISES} for s in STEP_SIZES}
    plot(losses)
    rows: dict[str, Any] = {
        f"eta lambda {s:g}": {f"k {k:g}": row(found, k, s) for k, found in by_noise.items()} for s, by_noise in losses.items()
    }
    setting = f"isotropic quadratic, d = 4096, {STEPS} steps, noise k |grad| / sqrt(3 d) a coordinate"
    write("findings_quadratic", {"setting": setting, "rows": rows})


if __name__ == "__main__":
    main()
