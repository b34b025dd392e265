"""Find the linears and tie their three GEMMs (``fp4.compiler.sites``). Changes nothing in the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from fp4.compiler.pipeline import Context
from fp4.compiler.sites import find_linears


@dataclass(frozen=True)
class TagGemms:
    name: ClassVar[str] = "tag_gemms"

    def run(self, graph: Graph, context: Context) -> bool:
        context.linears, context.unknown = find_linears(graph, context.inputs)
        if context.batch:
            for linear in context.linears:
                linear.shards["m"] = (context.batch,)
        return False
