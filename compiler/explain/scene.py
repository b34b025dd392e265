"""Shapes of a drawing, written as SVG or painted by matplotlib: one list of shapes, so that both show the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = "none"
    radius: float = 4
    dashed: bool = False
    tip: str = ""
    key: str = ""  # data-name in the SVG: what a page finds it by


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    size: float = 11
    color: str = "#1b1f24"
    anchor: str = "start"  # start, middle or end
    bold: bool = False


@dataclass(frozen=True)
class Curve:
    """A cubic from (x0, y0) to (x1, y1), both control points at x = `bend`; an arrow head at its end."""

    x0: float
    y0: float
    x1: float
    y1: float
    bend: float
    width: float
    color: str
    tip: str = ""


Shape = Box | Text | Curve


@dataclass
class Scene:
    width: float = 0
    height: float = 0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, shapes: Iterable[Shape]) -> None:
        self.shapes.extend(shapes)

    def svg(self) -> str:
        """The drawing as an SVG element, which is also a file of its own."""
        w, h = self.width, self.height
        size = f'viewBox="0 0 {w:g} {h:g}" width="{w:g}" height="{h:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">'
        return "\n".join([head, f'<rect width="{w:g}" height="{h:g}" fill="#ffffff"/>', *map(_svg, self.shapes), "</svg>", ""])

    def png(self, path: str | Path, scale: float = 1.5) -> None:
        """Paint to a PNG of `scale` pixels a unit. Needs matplotlib."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        points = 72  # an inch; one unit is a point
        figure = Figure(figsize=(self.width / points, self.height / points), dpi=points * scale, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        for order, shape in enumerate(self.shapes):
            _paint(axes, shape, order)
        figure.savefig(str(path))


def _svg(shape: Shape) -> str:
    if isinstance(shape, Box):
        dash = ' stroke-dasharray="4 3"' if shape.dashed else ""
        key = f' data-name="{escape(shape.key)}"' if shape.key else ""
        tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
        return (
            f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}" rx="{shape.radius:g}" '
            f'fill="{shape.fill}" stroke="{shape.stroke}"{dash}{key}>{tip}</rect>'
        )
    if isinstance(shape, Text):
        weight = ' font-weight="bold"' if shape.bold else ""
        return (
            f'<text x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size:g}" fill="{shape.color}" '
            f'text-anchor="{shape.anchor}"{weight}>{escape(shape.text)}</text>'
        )
    tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
    path = f"M{shape.x0:g} {shape.y0:g} C{shape.bend:g} {shape.y0:g} {shape.bend:g} {shape.y1:g} {shape.x1:g} {shape.y1:g}"
    line = (
        f'<path d="{path}" fill="none" stroke="{shape.color}" stroke-width="{shape.width:g}" stroke-opacity="0.85">{tip}</path>'
    )
    corners = " ".join(f"{x:g},{y:g}" for x, y in _head(shape))
    return f'{line}<polygon points="{corners}" fill="{shape.color}"/>'


def _head(curve: Curve) -> list[tuple[float, float]]:
    """The corners of the arrow head: it lies along the x axis, as the curve's end does."""
    size = 3.5 + curve.width / 2
    back = curve.x1 + (size * 1.6 if curve.bend > curve.x1 else -size * 1.6)
    return [(curve.x1, curve.y1), (back, curve.y1 - size), (back, curve.y1 + size)]


def _paint(axes: Any, shape: Shape, order: int) -> None:
    from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
    from matplotlib.path import Path as Outline

    if isinstance(shape, Box):
        radius = min(shape.radius, shape.width / 2, shape.height / 2)
        style = f"round,pad=0,rounding_size={radius}"
        edge: dict[str, Any] = {"linestyle": "--" if shape.dashed else "-", "edgecolor": shape.stroke, "linewidth": 1}
        patch = FancyBboxPatch((shape.x, shape.y), shape.width, shape.height, boxstyle=style, facecolor=shape.fill, **edge)
        axes.add_patch(patch).set_zorder(order)
    elif isinstance(shape, Text):
        how = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        weight = "bold" if shape.bold else "normal"
        size = shape.size * 0.97
        text = shape.text.replace("$", r"\$")
        axes.text(shape.x, shape.y, text, fontsize=size, color=shape.color, ha=how, va="baseline", weight=weight, zorder=order)
    else:
        points = [(shape.x0, shape.y0), (shape.bend, shape.y0), (shape.bend, shape.y1), (shape.x1, shape.y1)]
        outline = Outline(points, [Outline.MOVETO, Outline.CURVE4, Outline.CURVE4, Outline.CURVE4])
        line = PathPatch(outline, facecolor="none", edgecolor=shape.color, linewidth=shape.width, alpha=0.85)
        axes.add_patch(line).set_zorder(order)
        axes.add_patch(Polygon(_head(shape), closed=True, facecolor=shape.color, edgecolor="none", zorder=order))
