"""A drawing of a captured model: each linear's three GEMMs side by side, colour by format, width by bytes.

Top to bottom is the forward's order. Left: forward, with the activations that flow. Middle: what forward saves for backward.
Right: backward, dgrad and wgrad beside their own fprop, with the gradients that flow up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import networkx as nx
import torch

from fp4.compiler.explain.capture import Captured
from fp4.compiler.explain.fx import SHORT
from fp4.compiler.explain.graph import Row, flow
from fp4.compiler.explain.repeats import split
from fp4.compiler.explain.scene import Box, Curve, Scene, Shape, Text
from fp4.compiler.explain.table import ExplainTable, amount
from fp4.compiler.report import ABSENT, KEPT, GemmReport
from fp4.runtime.spec import Quantizer, Rotation

COLORS = {
    "nvfp4": "#2f9e5f",
    "mxfp4": "#12939a",
    "fp8": "#3f7fd6",
    "mxfp8": "#7a5fd0",
    "bf16": "#c4c8cc",
    "f16": "#d9c7a6",
    "f32": "#8f969d",
    "other": "#e6e8ea",
}
DARK = ("nvfp4", "mxfp4", "fp8", "mxfp8", "f32")  # formats whose text is white
INK, FAINT, RULE = "#1b1f24", "#6b7280", "#d5d9de"
FORWARD, SAVED, BACKWARD, RIGHT = 255, 565, 755, 1265  # where the columns begin; RIGHT: where they end
WIDTH, TOP, GAP = 1400, 96, 9
LINEAR, STEP = 54, 24  # heights of a row
CHIP, CHIP_GAP = 118, 5
BAR = 150  # length of the longest bar of saved bytes


def color(format_: str) -> str:
    return COLORS.get(format_, COLORS["other"])


def draw(captured: Sequence[Captured], title: str, collapse: bool = True, layer: str | None = None) -> Scene:
    """The drawing of a model's graphs, one below the other. collapse: layers that are alike are drawn once.

    layer: only the module of that name.
    """
    scene = Scene(WIDTH, 0)
    scene.add(_header(f"{title}: {layer}" if layer else title, ExplainTable.of(captured)))
    y: float = TOP
    for graph in captured:
        y = _Drawing(flow(graph, collapse, layer)).place(scene, y)
    scene.height = y + 14
    return scene


def _header(title: str, table: ExplainTable) -> Iterator[Shape]:
    yield Text(20, 26, title, 17, bold=True)
    for i, line in enumerate(table.summary()[:3]):
        yield Text(20, 44 + 14 * i, line, 10.5, FAINT)
    x: float = 690
    for name, fill in COLORS.items():
        yield Box(x, 14, 14, 14, fill)
        yield Text(x + 19, 25, name, 11)
        x += 34 + 7.5 * len(name)
    yield Text(
        WIDTH - 20, 44, "SR stochastic, MS ms_eden, 4/6 four over six, Hn rotation, *: of forward's copy", 10.5, FAINT, "end"
    )
    yield Text(WIDTH - 20, 58, "lines and bars: the wider or longer, the more bytes", 10.5, FAINT, "end")
    for x, text in ((FORWARD, "forward"), (SAVED - 14, "saved for backward"), (BACKWARD, "backward")):
        yield Text(x, TOP - 6, text, 12, bold=True)


class _Drawing:
    def __init__(self, graph: nx.MultiDiGraph) -> None:
        self.graph = graph
        self.rows: list[Row] = [graph.nodes[n]["row"] for n in sorted(graph, key=lambda n: graph.nodes[n]["order"])]
        self.saved = {row.name: _summed(row) for row in self.rows}
        self.most = max((size for bars in self.saved.values() for _, _, size in bars), default=1)
        self.widest = max((d["bytes"] for _, _, d in graph.edges(data=True)), default=1)
        self.middle: dict[str, float] = {}

    def place(self, scene: Scene, y: float) -> float:
        """Draw from `y` down; returns where it ends."""
        start: float | None = None
        run: Any = None
        shapes: list[Shape] = []
        for row in self.rows:
            if row.run != run:
                shapes += self._bracket(run, start, y)
                y += 8 if run or row.run else 0
                run, start = row.run, y
            height = LINEAR if row.linear else STEP
            height = max(height, 16 * len(self.saved[row.name]) + (16 if row.shared else 0) + 6)
            self.middle[row.name] = y + height / 2
            shapes += self._row(row, y, height)
            y += height + GAP
        shapes += self._bracket(run, start, y)
        scene.add(self._curves())
        scene.add(shapes)
        return y

    def _bracket(self, run: Any, start: float | None, end: float) -> Iterator[Shape]:
        if run is None or start is None:
            return
        color_ = "#30363d"
        yield Box(12, start - 3, 4, end - start - GAP + 6, color_, radius=2)
        yield Text(24, start + 14, f"x {run.count}" if run.count > 1 else "x 1", 17, color_, bold=True)
        yield Text(24, start + 29, run.label, 10.5, FAINT)

    def _row(self, row: Row, y: float, height: float) -> Iterator[Shape]:
        name = _short(row)
        if row.linear is None:
            yield Box(FORWARD, y, SAVED - FORWARD - 25, height, "#f4f5f7", RULE, tip=row.name, key=row.title)
            yield Text(FORWARD + 8, y + height / 2 + 4, _fit(name, 27), 11)
            yield Text(SAVED - 33, y + height / 2 + 4, _fit(_ops(row), 24), 9.5, FAINT, "end")
            if row.differentiable:
                yield Box(BACKWARD, y, RIGHT - BACKWARD, height, "#f4f5f7", RULE)
                yield Text(BACKWARD + 8, y + height / 2 + 4, f"{_fit(name, 40)}, gradient", 11, FAINT)
        else:
            yield Box(FORWARD - 8, y - 2, RIGHT - FORWARD + 16, height + 4, "#fbfcfd", "#9aa3ad", 7, tip=row.name, key=row.name)
            m, n, k = (x if x is not None else "?" for x in (row.linear.m, row.linear.n, row.linear.k))
            yield Text(FORWARD, y + 13, _fit(name, 34), 12, bold=True)
            yield Text(SAVED - 33, y + 13, f"{m} x {n} x {k}", 10, FAINT, "end")
            dtype = SHORT.get(getattr(torch, row.linear.dtype), row.linear.dtype)
            gemms = {g.role: g for g in row.linear.gemms}
            yield from self._gemm(gemms["fprop"], dtype, FORWARD, y + 19)
            yield from self._gemm(gemms["dgrad"], dtype, BACKWARD, y + 19)
            yield from self._gemm(gemms["wgrad"], dtype, BACKWARD + 258, y + 19)
        yield from self._bars(row, y)

    def _gemm(self, gemm: GemmReport, dtype: str, x: float, y: float) -> Iterator[Shape]:
        absent = ABSENT in gemm.operands.values()
        yield Text(x, y + 8, gemm.role if not absent else f"no {gemm.role}", 9.5, FAINT)
        if absent:
            return
        for i, (letter, value) in enumerate(gemm.operands.items()):
            format_, text = chip(letter, value, gemm.rotation, dtype)
            at = x + i * (CHIP + CHIP_GAP)
            yield Box(at, y + 12, CHIP, 18, color(format_), tip=f"{gemm.role} {letter}: {value} {gemm.rotation}".strip())
            yield Text(at + CHIP / 2, y + 25, text, 10, "#ffffff" if format_ in DARK else INK, "middle", format_ in DARK)

    def _bars(self, row: Row, y: float) -> Iterator[Shape]:
        y += 3
        for format_, letter, size in self.saved[row.name]:
            length = max(4, BAR * size / self.most)
            yield Box(SAVED - 14, y, length, 13, color(format_), "#30363d", 2, tip=f"saved: {letter} {format_}, {size:,} bytes")
            text = f"{letter} {format_} {amount(size)}".strip()
            inside = length > 6.2 * len(text)
            fill = "#ffffff" if inside and format_ in DARK else INK
            yield Text(SAVED - 14 + (5 if inside else length + 5), y + 10, text, 9.5, fill)
            y += 16
        if row.shared:
            letters = sorted({letter for letter, _ in row.shared})
            owner = row.shared[0][1].rpartition(".")[2]
            yield Text(SAVED - 14, y + 10, f"{' and '.join(letters)} as for {owner}", 9.5, FAINT)

    def _curves(self) -> Iterator[Shape]:
        for source, target, about in self.graph.edges(data=True):
            a, b = self.middle[source], self.middle[target]
            size = about["bytes"]
            width = 1 + 6 * math.sqrt(size / self.widest)
            reach = min(95, 16 + abs(b - a) * 0.16)
            tip = f"{source} -> {target}: {about['format']}, {size:,} bytes"
            if about["direction"] == "forward":
                x = FORWARD - (8 if self.graph.nodes[source]["row"].linear else 0)
                end = FORWARD - (8 if self.graph.nodes[target]["row"].linear else 0)
                yield Curve(x, a + 5, end - 1, b - 5, FORWARD - 8 - reach, width, color(about["format"]), tip)
            else:
                x = RIGHT + (8 if self.graph.nodes[source]["row"].linear else 0)
                end = RIGHT + (8 if self.graph.nodes[target]["row"].linear else 0)
                yield Curve(x, a - 5, end + 1, b + 5, RIGHT + 8 + reach, width, color(about["format"]), tip)


def chip(letter: str, value: str, rotation: str, dtype: str) -> tuple[str, str]:
    """An operand's format and its text in the drawing: "nvfp4", "dY nvfp4 SR H16". dtype: of what is not quantized."""
    if value == KEPT:
        return dtype, f"{letter} {dtype}"
    text, of_forward, _ = value.partition(" of the forward copy")
    text = text.partition(",")[0] if "[" not in text else text[: text.index("]") + 1]
    if text == KEPT:
        return dtype, f"{letter} {dtype}*"
    quantizer = Quantizer.parse(text)
    parts = [letter, quantizer.name + ("*" if of_forward else "")]
    if quantizer.block[0] > 1:
        parts.append("x".join(map(str, quantizer.block)))
    if getattr(quantizer, "four_six", False):
        parts.append("4/6")
    parts += {"stochastic": ["SR"], "ms_eden": ["MS"]}.get(quantizer.rounding, [])
    if rotation:
        parts.append(f"H{Rotation.parse(rotation).size}")
    return quantizer.name, " ".join(parts)


def _summed(row: Row) -> list[tuple[str, str, int]]:
    """Saved bytes by (format, operand), an operand's scales with its codes; what is under 64 bytes is left out."""
    quantized = {
        letter: format_ for format_, letter, _ in row.saved if letter and format_ in ("nvfp4", "mxfp4", "fp8", "mxfp8")
    }
    sums: Counter[tuple[str, str]] = Counter()
    for format_, letter, size in row.saved:
        sums[quantized.get(letter, format_), letter] += size
    return [(f, letter, size) for (f, letter), size in sorted(sums.items(), key=lambda x: -x[1]) if size >= 64]


def _short(row: Row) -> str:
    """The row's name without what its bracket says already."""
    parts = split(row.path)
    if row.run is not None and parts:
        inside = parts[2].lstrip(".")
        return inside or "residual"
    return row.title


def _ops(row: Row) -> str:
    names = [op.partition(".")[0].strip("_") for op in row.ops]
    attention = [n for n in names if "attention" in n]
    if attention:
        return "attention"
    return " ".join(dict.fromkeys(names))


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-length + 1 :]
