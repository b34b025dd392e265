"""The table of an explanation: every linear, its three GEMMs, each operand's quantizer, what is saved, and totals."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp4.compiler.explain.capture import Captured
from fp4.compiler.explain.repeats import Run, runs, split
from fp4.compiler.explain.saved import Saved, saved_tensors
from fp4.compiler.report import ABSENT, KEPT, GemmReport, GraphReport, LinearReport

ALIVE = {"parameter": "the parameter", "input": "the input", "output": "the output"}
SCALAR = 8  # bytes
HEADINGS = ("linear", "(M, N, K)", "GEMM", "first operand", "second operand", "rotation", "saved for backward", "why not")


def amount(size: float) -> str:
    """Bytes for a reader: 512 B, 1.5 KiB, 20 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.4g} GiB"


@dataclass
class Totals:
    """gemms: role -> (quantized, all). flops: of a step's GEMMs, 2 M N K each; a dynamic size counts as none.

    saved: bytes between forward and backward by format, linears' operands and the rest apart; tensors that live anyway
    (parameters, inputs, outputs) are not in it.
    """

    linears: int = 0
    gemms: dict[str, tuple[int, int]] = field(default_factory=dict)
    flops: int = 0
    flops_quantized: int = 0
    saved_for_linears: dict[str, int] = field(default_factory=dict)
    saved_elsewhere: dict[str, int] = field(default_factory=dict)


@dataclass
class LinearTable:
    """report: as fp4.report's. saved: role -> what forward keeps for that GEMM. shared: role -> other linears that read it."""

    report: LinearReport
    saved: dict[str, list[Saved]]
    shared: dict[str, list[str]]


@dataclass
class ExplainTable:
    """``print(table)`` is plain text; ``table.show()`` uses rich in a terminal and plain text in a pipe.

    collapse: layers that are alike are one row each, named model.layers.0-26.
    """

    graphs: list[tuple[GraphReport, list[LinearTable], list[Saved]]]
    collapse: bool = False

    @staticmethod
    def of(captured: Sequence[Captured], collapse: bool = False) -> ExplainTable:
        graphs = []
        for graph in captured:
            saved = saved_tensors(graph)
            by_gemm: dict[tuple[str, str], list[Saved]] = defaultdict(list)
            for tensor in saved:
                for name, role, _ in tensor.readers:
                    by_gemm[name, role].append(tensor)
            report = graph.report
            assert report is not None
            order = {x.name: i for i, x in enumerate(report.linears)}
            rows = []
            for linear in report.linears:
                kept = {g.role: by_gemm[linear.name, g.role] for g in linear.gemms}
                others = {}
                for role, tensors in kept.items():
                    names = {n for t in tensors if _own(t) for n, _, _ in t.readers if n != linear.name}
                    others[role] = sorted(names, key=lambda n: order[n])
                rows.append(LinearTable(linear, kept, others))
            graphs.append((report, rows, saved))
        return ExplainTable(graphs, collapse)

    def totals(self) -> Totals:
        """Counts, FLOPs and saved bytes of all the graphs."""
        total = Totals()
        gemms: dict[str, list[int]] = {}
        inside: Counter[str] = Counter()
        elsewhere: Counter[str] = Counter()
        for _, rows, saved in self.graphs:
            total.linears += len(rows)
            for row in rows:
                r = row.report
                flops = 2 * (r.m or 0) * (r.n or 0) * (r.k or 0)
                for gemm in r.gemms:
                    if ABSENT in gemm.operands.values():
                        continue
                    count = gemms.setdefault(gemm.role, [0, 0])
                    count[0] += gemm.quantized
                    count[1] += 1
                    total.flops += flops
                    total.flops_quantized += flops * gemm.quantized
            for tensor in saved:
                if tensor.kind == "saved":
                    (inside if tensor.readers else elsewhere)[tensor.format] += tensor.bytes
        total.gemms = {role: (q, n) for role, (q, n) in gemms.items()}
        total.saved_for_linears, total.saved_elsewhere = dict(inside), dict(elsewhere)
        return total

    def rows(self) -> list[tuple[str, ...]]:
        """One row a GEMM, in the columns of HEADINGS; the linear's name and size in its first."""
        found = []
        for _, linears, _ in self.graphs:
            run = runs({x.report.name: _signature(x) for x in linears}) if self.collapse else {}
            for linear in linears:
                name = linear.report.name
                if name in run:
                    _, number, rest = split(name)  # type: ignore[misc]
                    if number != run[name].first:
                        continue
                    name = run[name].name(rest)
                for i, gemm in enumerate(linear.report.gemms):
                    found.append(_row(name if i == 0 else "", linear, gemm, run))
        return found

    def summary(self) -> list[str]:
        """The totals, a line each."""
        t = self.totals()
        counts = ", ".join(f"{role} {q} of {n}" for role, (q, n) in t.gemms.items())
        share = f"; {100 * t.flops_quantized / t.flops:.1f} % of the GEMMs' FLOPs" if t.flops else ""
        lines = [f"{t.linears} linears; quantized GEMMs: {counts}{share}"]
        for what, by_format in (("linears", t.saved_for_linears), ("everything else", t.saved_elsewhere)):
            if by_format:
                parts = ", ".join(f"{f} {amount(b)}" for f, b in sorted(by_format.items(), key=lambda x: -x[1]))
                lines.append(f"saved for backward by {what}: {amount(sum(by_format.values()))} ({parts})")
        for report, _, _ in self.graphs:
            lines += [f"{n} other matrix product{'s' * (n > 1)}: {reason}" for reason, n in report.unknown.items()]
            lines += [f"warning: {w}" for w in report.warnings]
        return lines

    def title(self) -> str:
        kinds = [f"{report.kind}" for report, _, _ in self.graphs]
        return f"policy {self.graphs[0][0].policy}, {kinds[0] if len(set(kinds)) == 1 else ' and '.join(kinds)}" + (
            f", {len(kinds)} graphs" if len(kinds) > 1 else ""
        )

    def to_dict(self) -> dict[str, Any]:
        graphs = []
        for report, rows, saved in self.graphs:
            linears = [
                {**asdict(x.report), "saved": {r: [t.name for t in v] for r, v in x.saved.items()}, "shared": x.shared}
                for x in rows
            ]
            graphs.append({**asdict(report), "linears": linears, "saved": [asdict(t) for t in saved]})
        return {"graphs": graphs, "totals": asdict(self.totals())}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_markdown(self) -> str:
        lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows()]
        return "\n".join([f"{self.title()}", "", *lines, "", *(f"- {line}" for line in self.summary())])

    def __str__(self) -> str:
        rows = [HEADINGS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.title(), *lines, *self.summary()])

    def __rich__(self) -> Table:
        table = Table(*HEADINGS, title=self.title(), caption=escape("\n".join(self.summary())), caption_justify="left")
        rows = self.rows()
        for i, row in enumerate(rows):
            last = i + 1 == len(rows) or bool(rows[i + 1][0])
            table.add_row(*(_styled(cell) for cell in row), end_section=last)
        return table

    def show(self) -> None:
        """Print: rich in a terminal, plain text when piped."""
        if sys.stdout.isatty():
            Console().print(self)
        else:
            print(self)


def _styled(cell: str) -> str:
    text = escape(cell)
    words = (("mxfp4", "cyan"), ("nvfp4", "green"), ("fp8", "blue"), (KEPT, "dim"), (ABSENT, "dim"))
    style = next((s for word, s in words if word in cell), "")
    return f"[{style}]{text}[/]" if style else text


def _signature(linear: LinearTable) -> Any:
    r = linear.report
    gemms = tuple((g.role, tuple(g.operands.items()), g.rotation, g.reason, g.output) for g in r.gemms)
    kept = tuple((role, tuple(sorted((t.format, t.part, t.bytes) for t in v if _own(t)))) for role, v in linear.saved.items())
    return (r.m, r.n, r.k, r.dtype, gemms, kept)


def _row(name: str, linear: LinearTable, gemm: GemmReport, run: dict[str, Run]) -> tuple[str, ...]:
    r = linear.report
    size = str(tuple("?" if x is None else x for x in (r.m, r.n, r.k))).replace("'", "") if name else ""
    operands = [f"{letter} {value}" for letter, value in gemm.operands.items()]
    return (name, size, gemm.role, *operands, gemm.rotation, _kept(linear, gemm, run), gemm.reason or gemm.result)


def _own(tensor: Saved) -> bool:
    """Is it saved for the GEMM's operand alone? The seed is one for the graph."""
    return tensor.kind == "saved" and tensor.part != "seed"


def _kept(linear: LinearTable, gemm: GemmReport, run: dict[str, Run]) -> str:
    """X nvfp4 codes + scales 1.5 KiB, with k_proj: by format, the largest first; what lives anyway without its bytes."""
    parts = []
    for letter in gemm.operands:
        tensors = [t for t in linear.saved[gemm.role] if (linear.report.name, gemm.role, letter) in t.readers]
        own = [t for t in tensors if _own(t)]
        codes = [t for t in own if t.part == "codes"]
        if codes or any(t.bytes > SCALAR for t in own):
            largest = (codes or sorted(own, key=lambda t: -t.bytes))[0]
            parts.append(f"{letter} {largest.format} {amount(sum(t.bytes for t in own))}")
        else:
            kinds = [t.kind for t in tensors if t.kind != "saved"]
            parts += [f"{letter} {ALIVE[kinds[0]]}"] if kinds else []
    others = [n.rpartition(".")[2] for n in linear.shared[gemm.role]]
    if len(others) > 3:
        others = [*others[:3], f"{len(others) - 3} more"]
    return "; ".join(parts) + (f", with {', '.join(others)}" if others and parts else "")
