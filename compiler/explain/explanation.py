"""``fp4.explain``: what the compiler makes of a model, without a training step and without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fp4.compiler.backend import Options
from fp4.compiler.explain import fx, mlir
from fp4.compiler.explain.capture import BACKWARD, FORWARD, LOWERED, REWRITTEN, TAGGED, Captured, ExplainError, capture
from fp4.compiler.explain.draw import draw
from fp4.compiler.explain.graph import flow, ops
from fp4.compiler.explain.html import page
from fp4.compiler.explain.levels import Levels, levels
from fp4.compiler.explain.scene import Scene
from fp4.compiler.explain.table import ExplainTable
from fp4.compiler.lowering import LoweringOptions
from fp4.compiler.policy import Policy

CPU = "cpu"


@dataclass(frozen=True, eq=False)
class Explanation:
    """A captured model. graphs: one for each compiled graph, one where Dynamo did not break the model.

    model: its class's name. lowering: the backend's options that `lowered` and the kernels follow.
    """

    model: str
    policy: Policy
    lowering: LoweringOptions
    graphs: list[Captured]

    @property
    def target(self) -> str:
        """ "cpu", or the GPU architecture that `lowered` and the kernels are for."""
        return self.lowering.target or CPU

    @property
    def stages(self) -> list[str]:
        """What fx, diff and mlir take: captured, tagged, the passes, rewritten, forward, backward, lowered."""
        passes = list(self.graphs[0].stages)
        return ["captured", TAGGED, *passes[1:], REWRITTEN, FORWARD, BACKWARD, LOWERED]

    def table(self, collapse: bool = False) -> ExplainTable:
        """Every linear, its GEMMs, their operands, what is saved. collapse: layers that are alike once."""
        return ExplainTable.of(self.graphs, collapse)

    def fx(self, stage: str = REWRITTEN) -> str:
        """The graphs at a stage, as readable code. Raises ExplainError for an unknown stage."""
        if stage == LOWERED:
            pairs = zip(self.graphs, self._lowered, strict=True)
            codes = [fx.code(gm, f"{LOWERED}_{name}", c.context.inputs) for c, pair in pairs for name, gm in pair.items()]
            return "\n\n".join(codes)
        parts = []
        for captured in self.graphs:
            graph = self._graph(captured, stage)
            if graph is not None:
                parts.append(fx.code(graph, stage, captured.context.inputs))
        return "\n\n".join(parts)

    def diff(self, first: str = TAGGED, second: str = REWRITTEN, context: int = 2) -> str:
        """Unified diff of the code at two stages; empty where nothing changed. context: lines around a change."""
        return fx.diff(self.fx(first), self.fx(second), (first, second), context)

    def mlir(self, stage: str = REWRITTEN) -> str:
        """The graphs at a stage as one MLIR module each: ``torch`` ops by torch-mlir, ours in the dialect ``fp4``.

        Each parses and verifies again (``fp4.compiler.explain.mlir.parse``). "lowered" has the kernels of a GPU target, and the
        rest of our ops as they are: their bodies on a CPU are subgraphs, which torch-mlir does not import.
        Raises ExplainError for an unknown stage.
        """
        if stage == LOWERED:
            pairs = self._partitioned(kernels_only=True)
            return "\n".join(mlir.mlir(gm, f"{LOWERED}_{name}") for pair in pairs for name, gm in pair.items())
        graphs = [self._graph(captured, stage) for captured in self.graphs]
        return "\n".join(mlir.mlir(graph, stage) for graph in graphs if graph is not None)

    def levels(self, linear: str) -> Levels:
        """One linear top to bottom: FX as captured, rewritten and lowered, MLIR, and for a GPU target the Triton source, TTIR,
        TTGIR, PTX and SASS of each of its kernels, compiled here without a GPU. ``print()`` shows them all.

        linear: its name in the table. Raises ExplainError for an unknown one.
        """
        return levels(self.graphs, self._partitioned(kernels_only=True), linear, self.target)

    def graph(self, level: str = "linears", collapse: bool = False) -> list[Any]:
        """The dataflow of each captured graph, for networkx.

        level: "linears", linears and the steps between them (``fp4.compiler.explain.graph.flow``); "ops", every node of the
        rewritten graph. collapse: layers that are alike once, at level "linears".
        """
        if level not in ("linears", "ops"):
            raise ExplainError(f"level={level!r}; write 'linears' or 'ops'")
        return [flow(g, collapse) if level == "linears" else ops(g) for g in self.graphs]

    def draw(self, path: str | Path | None = None, *, collapse: bool = True, layer: str | None = None) -> Scene:
        """Draw the model: colour by format, width by bytes, a linear's GEMMs side by side, what is saved between them.

        path: .svg, or .png (needs matplotlib); None: no file, and ``svg()`` of the result is the text. collapse: layers that
        are alike once. layer: only one module, e.g. "model.layers.0".
        """
        scene = draw(self.graphs, f"{self.model}, policy {self.policy.name}", collapse, layer)
        suffix = Path(path).suffix if path is not None else None
        if suffix == ".svg":
            Path(str(path)).write_text(scene.svg())
        elif suffix == ".png":
            scene.png(str(path))
        elif suffix is not None:
            raise ExplainError(f"draw({str(path)!r}): write a name that ends in .svg or .png")
        return scene

    def html(self, path: str | Path | None = None, linears: Sequence[str] = ()) -> str:
        """One self-contained page: the table, the drawing, the stages side by side, MLIR; searchable, no network.

        path: where to write it; None: the text is returned only. linears: names of linears to show at every level (``levels``).
        A place in the page: ``page.html#tab=stages&left=captured&right=rewritten&search=q_proj``.
        """
        text = page(self, linears)
        if path is not None:
            Path(path).write_text(text)
        return text

    def _graph(self, captured: Captured, stage: str) -> Graph | GraphModule | None:
        if stage in captured.stages:
            return captured.stages[stage]
        if stage == TAGGED:
            return captured.stages["assign_precision"]
        if stage == REWRITTEN:
            return captured.rewritten
        if stage in (FORWARD, BACKWARD):
            return getattr(captured, stage)
        raise ExplainError(f"no stage {stage!r}; write one of {', '.join(self.stages)}")

    @cached_property
    def _lowered(self) -> list[dict[str, GraphModule]]:
        return self._partitioned()

    def _partitioned(self, kernels_only: bool = False) -> list[dict[str, GraphModule]]:
        """The forward and backward graphs, lowered for the target."""
        found = []
        for captured in self.graphs:
            pair = {FORWARD: captured.forward, BACKWARD: captured.backward}
            found.append({name: lower(gm, self.lowering, kernels_only) for name, gm in pair.items() if gm is not None})
        return found


def lower(gm: GraphModule, options: LoweringOptions, kernels_only: bool = False) -> GraphModule:
    """A copy of a partitioned graph, lowered as the backend would; or, kernels_only, its generated kernels alone."""
    from fp4.passes import lowering

    made = copy.deepcopy(gm)
    for p in lowering(options):
        if not (kernels_only and p.name in ("lower_collectives", "lower_reference")):
            p.run(made.graph)
    made.graph.lint()
    return made


def explain(
    model: nn.Module,
    *inputs: Any,
    recipe: str | None = None,
    policy: Policy | None = None,
    phase: str | None = None,
    target: str | None = None,
    autocast: torch.dtype | None = None,
    save_weights: bool = False,
    library: bool = False,
    exact: bool = True,
    native_draws: bool = False,
    **named: Any,
) -> Explanation:
    """What ``torch.compile(model, backend="fp4")`` would make of the model's forward and backward. Nothing is run or allocated.

    inputs, named: the model's arguments, of which only shapes and dtypes matter; they and the model may lie on any device,
        "meta" included. Under ``torch.no_grad()``, or where nothing requires a gradient, the inference graph.
    recipe, policy, phase, save_weights, library, exact, native_draws: as the backend's options. target: "cpu" (default), or a
        GPU architecture such as "sm_90" or "sm_100a", for the lowered graphs, the kernels, and the report of what its tensor
        cores multiply.
    autocast: dtype that the model's matrix products run in, e.g. torch.bfloat16; the surrounding autocast's when None.

    Raises ExplainError for a model that cannot be traced without values, OptionError and PolicyError as the backend does.
    """
    gpu = None if target == CPU else target
    given = {"recipe": recipe, "policy": policy, "phase": phase, "save_weights": save_weights, "target": gpu}
    given |= {"library": library, "exact": exact, "native_draws": native_draws}
    options = Options.read({k: v for k, v in given.items() if v is not None}, None)
    options.check_draws([torch.empty(0)])  # what is captured lies on a CPU
    graphs = capture(model, inputs, named, options, autocast)
    return Explanation(type(model).__name__, options.resolved(), options.lowering, graphs)
