"""Mean squared error of every quantizer on N(0, 1), beside the published values.

    python -m benchmarks.findings.mse

The table is Quartet II's (2601.22813, section 3 and released notebooks), bits = -log2(MSE) / 2, with Quartet's MXFP4
(2505.14669, table 2). Gain is <Q(x), x> / <x, x>: below 1 the quantizer shrinks. Clipped is the share of the
elements cut to the largest code. A power-of-two scale makes MXFP4's error depend on where the data's standard deviation
falls between two powers of two, so MXFP4 is also measured for standard deviations from 1 to 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fp4
from benchmarks.common import write
from benchmarks.findings.common import generator, save, single_thread
from fp4.runtime import reference

QUARTET2 = "2601.22813, notebooks"
QUARTET = "2505.14669, table 2"


@dataclass(frozen=True)
class Row:
    """A quantizer, with the published MSE and its source where there is one. differs: how theirs is not ours."""

    label: str
    quantizer: fp4.Quantizer
    rotation: fp4.Rotation | None = None
    published: float | None = None
    source: str | None = None
    differs: str | None = None


# FP32 after the rotation: the error is then the quantizer's alone.
H128 = fp4.Rotation(128, signs="fresh", bf16=False)
ROWS = (
    Row("NVFP4 1x16 RNE", fp4.NVFP4(), None, 9.0e-3, QUARTET2),
    Row("NVFP4 1x16 four_six", fp4.NVFP4(four_six=True), None, 7.6e-3, QUARTET2),
    Row("NVFP4 16x16 RNE", fp4.NVFP4(block=(16, 16)), None, 12.4e-3, QUARTET2),
    Row("NVFP4 16x16 four_six", fp4.NVFP4(block=(16, 16), four_six=True), None, 12.4e-3, QUARTET2),
    Row("NVFP4 SR, factor 6", fp4.NVFP4(rounding="stochastic")),
    Row("NVFP4 SR, range_guard", fp4.NVFP4(rounding="stochastic", range_guard=True), None, 23.5e-3, QUARTET2),
    Row(
        "NVFP4 MS-EDEN, H128",
        fp4.NVFP4(rounding="ms_eden"),
        H128,
        9.8e-3,
        QUARTET2,
        "their notebook corrects 128 elements at once, we each block of 16, as their kernels do",
    ),
    Row("NVFP4 MS-EDEN posthoc, H128", fp4.NVFP4(rounding="ms_eden", posthoc=True), H128),
    Row("MXFP4 floor RNE", fp4.MXFP4()),
    Row("MXFP4 even RNE", fp4.MXFP4(scale_rule="even")),
    Row("MXFP4 uos RNE", fp4.MXFP4(scale_rule="uos")),
    Row("MXFP4 ceil RNE", fp4.MXFP4(scale_rule="ceil")),
    Row(
        "MXFP4 quest RNE",
        fp4.MXFP4(scale_rule="quest"),
        None,
        1.32e-2,
        QUARTET,
        "near the optimum of a real-valued scale; released code and kernels, and ours, floor the scale to a power of two",
    ),
    Row("MXFP4 range_fit RNE", fp4.MXFP4(scale_rule="range_fit"), None, 1.37e-2, QUARTET),
    Row("MXFP4 ceil SR", fp4.MXFP4(rounding="stochastic", scale_rule="ceil")),
    Row("MXFP4 floor 3/4 SR", fp4.MXFP4(rounding="stochastic", prescale=0.75)),
    Row("MXFP4 range_fit SR", fp4.MXFP4(rounding="stochastic", scale_rule="range_fit"), None, 2.77e-2, QUARTET),
    Row("MXFP8 E4M3", fp4.MXFP8()),
    Row("FP8 E4M3 1x128", fp4.FP8()),
)


def measure(x: Tensor, row: Row, seed: int = 1) -> dict[str, Any]:
    """MSE, bits, gain, share clipped of one quantizer on x (R, C)."""
    quantized = fp4.quantize(x, row.quantizer, rotation=row.rotation, seed=seed)
    error = quantized.error(x)
    value = x if row.rotation is None else reference.rotate(x, row.rotation, quantized.seed, 0)
    value, decoded = value.double(), quantized.dequantize(torch.float32).double()
    return {
        "mse": error.mse,
        "bits": bits(error.mse),
        "gain": float((decoded * value).sum() / (value * value).sum()),
        # MS-EDEN changes the scale after rounding, which blurs what was clipped.
        "clipped": None if row.quantizer.rounding == "ms_eden" else error.saturation,
        "stored bits": row.quantizer.bits_per_element,
    }


def over_sigma(x: Tensor, q: fp4.Quantizer, steps: int = 8) -> list[float]:
    """Least and largest relative MSE of 2^(i / steps) x, i < steps: of standard deviations 1 to 2 when x is N(0, 1)."""
    scaled = [x * 2.0 ** (i / steps) for i in range(steps)]
    found = [fp4.quantize(y, q, seed=1).error(y).relative_mse for y in scaled]
    return [min(found), max(found)]


def bits(mse: float) -> float:
    return -math.log2(mse) / 2


def draw(rows: dict[str, dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    names = list(rows)
    figure = Figure(figsize=(9.5, 6.8), layout="constrained", dpi=120)
    axis = figure.subplots()
    colors = ["C0" if n.startswith("NVFP4") else "C1" if n.startswith("MXFP4") else "C2" for n in names]
    axis.barh(names, [1e3 * rows[n]["mse"] for n in names], color=colors, height=0.7)
    known = [n for n in names if rows[n]["published MSE"] is not None]
    for i, name in enumerate(names):
        if rows[name]["relative MSE, sigma 1 to 2"]:
            low, high = rows[name]["relative MSE, sigma 1 to 2"]
            axis.plot([1e3 * low, 1e3 * high], [i, i], color="0.25", linewidth=2.5)
    axis.plot([], [], color="0.25", linewidth=2.5, label="relative MSE, standard deviations 1 to 2")
    axis.plot([1e3 * rows[n]["published MSE"] for n in known], known, "k|", markersize=16, markeredgewidth=2, label="published")
    for i, name in enumerate(names):
        spread = rows[name]["relative MSE, sigma 1 to 2"] or [0.0]
        right = 1e3 * max(rows[name]["mse"], rows[name]["published MSE"] or 0, *spread)
        axis.text(right + 0.4, i, f"{1e3 * rows[name]['mse']:.2f}  ({rows[name]['bits']:.2f} bits)", va="center", fontsize=9)
    axis.invert_yaxis()
    axis.set(xlabel="mean squared error on N(0, 1), units of 1e-3", xlim=(0, 37))
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
    save(figure, "mse")


def main() -> None:
    single_thread()
    x = torch.randn(2048, 1024, generator=generator(100))
    rows = {}
    for row in ROWS:
        rows[row.label] = measure(x, row) | {
            "quantizer": str(row.quantizer),
            "rotation": str(row.rotation) if row.rotation else None,
            "relative MSE, sigma 1 to 2": over_sigma(x[:256], row.quantizer) if isinstance(row.quantizer, fp4.MXFP4) else None,
            "published MSE": row.published,
            "published bits": bits(row.published) if row.published else None,
            "source": row.source,
            "differs": row.differs,
        }
    draw(rows)
    write("findings_mse", {"setting": "N(0, 1), 2^21 samples as 2048 x 1024, one draw", "rows": rows})


if __name__ == "__main__":
    main()
