"""The backend's options that decide what a partitioned graph becomes, in one value: what compiles a graph, what reports on it
and what shows it (``fp4.explain``) all read this one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph

from fp4.compiler.report import TensorCores


@dataclass(frozen=True)
class LoweringOptions:
    """The backend's options of these names, explained at ``fp4.compiler.backend.Options``."""

    kernels: bool = True
    target: str | None = None
    library: bool = False
    exact: bool = True
    native_draws: bool = False

    def tensor_cores(self, graph: Graph) -> TensorCores:
        """What multiplies on the architecture that the graph is lowered for."""
        from fp4.passes.lower_blackwell import block_scaled_target
        from fp4.passes.lower_fp8 import has_blocks, has_fp8

        devices = (v.device for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor))
        device = next(devices, torch.device("cpu"))
        eight = self.kernels and not self.exact
        fp8, blocks = eight and has_fp8(device, self.target), eight and has_blocks(device, self.target)
        return TensorCores(block_scaled_target(device, self.target), self.kernels, self.library, fp8, blocks)


DEFAULTS = LoweringOptions()
