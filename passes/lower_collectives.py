"""Lower ``fp4::reduce_amax`` to functional collectives, which Inductor schedules as the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph

from fp4.compiler.graph import Builder, fp4_nodes


@dataclass(frozen=True)
class LowerCollectives:
    name: ClassVar[str] = "lower_collectives"

    def run(self, graph: Graph) -> bool:
        found = list(fp4_nodes(graph, "reduce_amax"))
        for node in found:
            build = Builder(graph, node)
            amax: Any = node.args[0]
            for group in node.args[1]:  # type: ignore[union-attr]
                amax = build.call(torch.ops._c10d_functional.all_reduce.default, amax, "max", group)
                amax = build.call(torch.ops._c10d_functional.wait_tensor.default, amax)
            node.replace_all_uses_with(amax)
            graph.erase_node(node)
        return bool(found)
