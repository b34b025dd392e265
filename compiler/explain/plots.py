"""Heat maps of an error report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4.compiler.sites import OPERANDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fp4.compiler.explain.measure import GemmError

    Linears = dict[str, list[GemmError]]

RESULTS = {"fprop": "Y", "dgrad": "dX", "wgrad": "dW"}
ROW = 0.24  # inches a row
WRITTEN = 40  # rows up to which every cell has its figure in it


def heat_maps(title: str, linears: Linears, path: str | Path | None) -> Any:
    """SQNR of the operands, dB, and relative error of the results on a logarithmic scale; a row a linear, grey where kept."""
    from matplotlib.colors import LogNorm

    operands = [f"{role}\n{letter}" for role, letters in OPERANDS.items() for letter in letters]
    sqnr = np.full((len(linears), len(operands)), np.nan)
    error = np.full((len(linears), len(RESULTS)), np.nan)
    for row, gemms in enumerate(linears.values()):
        for g in gemms:
            if g.quantized:
                error[row, list(RESULTS).index(g.role)] = g.relative_error
                for o in g.operands:
                    sqnr[row, operands.index(f"{g.role}\n{o.name}")] = math.nan if o.sqnr_db is None else o.sqnr_db
    figure = _figure(len(linears), 9.0)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _heat(left, sqnr, operands, list(linears), "viridis", "{:.0f}")
    left.set_title("SQNR of the operand, dB")
    norm = LogNorm() if _spread(error) else None
    _heat(right, error, [f"{r}\n{t}" for r, t in RESULTS.items()], None, "viridis_r", "{:.2g}", norm)
    right.set_title("relative error of the result")
    figure.suptitle(title, fontsize="small", wrap=True)
    return _saved(figure, path)


def scale_map(linears: Linears, path: str | Path | None) -> Any:
    """Share of an operand's blocks by the binary exponent of their scale; the first column is the blocks of scale zero."""
    rows: dict[str, tuple[GemmError, Any]] = {}
    for name, gemms in linears.items():
        for g in gemms:
            rows |= {f"{name} {g.role} {o.name}": (g, o) for o in g.operands if o.scales or o.zero_scales}
    exponents = sorted({e for _, o in rows.values() for e in o.scales})
    columns = list(range(exponents[0], exponents[-1] + 1)) if exponents else []
    share = np.zeros((len(rows), len(columns) + 1))
    for row, (_, o) in enumerate(rows.values()):
        total = sum(o.scales.values()) + o.zero_scales
        share[row] = [o.zero_scales / total, *(o.scales.get(e, 0) / total for e in columns)]
    figure = _figure(len(rows), 9.0)
    axes = figure.subplots()
    share[share == 0] = np.nan
    _heat(axes, share, ["zero", *(f"$2^{{{e}}}$" for e in columns)], list(rows), "viridis", "{:.2f}")
    axes.set_title("share of the blocks by block scale, to the power of two below; grey: none")
    return _saved(figure, path)


def _figure(rows: int, width: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib, not installed here; install with: pip install "torch-fp4[plot]"') from error
    return Figure(figsize=(width, 1.6 + ROW * max(rows, 1)), layout="constrained", dpi=120)


def _heat(
    axes: Axes, values: Any, columns: list[str], rows: list[str] | None, colours: str, text: str, norm: Any = None
) -> None:
    axes.set_facecolor("lightgrey")
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, fontsize="small")
    axes.set_yticks(range(len(values)), rows if rows is not None else [""] * len(values), fontsize="small")
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    if len(values) > WRITTEN:
        return
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            dark = sum(image.cmap(image.norm(value))[:3]) < 1.4
            axes.text(column, row, text.format(value), ha="center", va="center", fontsize="x-small", color="w" if dark else "k")


def _spread(values: Any) -> bool:
    positive = values[np.isfinite(values) & (values > 0)]
    return positive.size > 0 and bool(positive.min() < positive.max())


def _saved(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        figure.savefig(path)
    return figure
