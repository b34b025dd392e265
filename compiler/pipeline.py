"""The ordered joint-graph passes, run with verification and dumps between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4.compiler.policy import Decision, GemmPrecision, Policy
from fp4.compiler.shards import Shard, unique
from fp4.compiler.sites import GemmSite, Input, Linear, Role
from fp4.compiler.verify import verify

log = logging.getLogger("fp4.pipeline")


@dataclass
class Context:
    """What the passes of one graph share: the policy, Dynamo's names, the sites found, the decisions."""

    policy: Policy
    inputs: dict[int, Input]
    save_weights: bool = False
    batch: Shard | None = None  # this rank's part of the batch, where amax and draws are the whole batch's
    tensor_group: str = ""  # ranks that draw alike though no graph input says so
    linears: list[Linear] = field(default_factory=list)
    unknown: list[GemmSite] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def gemms(self) -> Iterator[tuple[Linear, Role, GemmSite, GemmPrecision]]:
        """Every GEMM found, with the precision decided for it; a stack of experts is one op, and has none here."""
        for linear, decision in zip(self.linears, self.decisions, strict=True):
            if linear.experts:
                continue
            precisions = decision.precision.gemms()
            for role, gemm in linear.gemms.items():
                yield linear, role, gemm, precisions[role]

    @property
    def groups(self) -> tuple[str, ...]:
        """The process groups whose ranks draw with one seed: they hold parts, or copies, of the same tensors."""
        meshes = [g for _, x in sorted(self.inputs.items()) for g in x.groups]
        batch = [self.batch.group] if self.batch else []
        return unique(filter(None, (*meshes, self.tensor_group, *batch)))

    def seed(self, graph: Graph) -> Node:
        """The graph's one random seed, a (1,) int64 tensor: drawn once, so that checkpointing and a small memory budget
        recompute with the same draws; every op's draw also depends on its `site`."""
        for node in graph.nodes:
            if node.meta.get("fp4") == "seed":
                return node
        first = next(n for n in graph.nodes if n.op != "placeholder")
        model = next(n for n in graph.nodes if isinstance(n.meta.get("val"), torch._subclasses.FakeTensor))
        with graph.inserting_before(first):
            groups = (list(self.groups),) if self.groups else ()
            seed = graph.call_function(torch.ops.fp4.seed.default, (model.meta["val"].device, *groups))
        with model.meta["val"].fake_mode:
            seed.meta["val"] = torch.ops.fp4.seed.default(*seed.args)
        seed.meta["fp4"] = "seed"
        if "partitioner_tag" in model.meta:
            seed.meta["partitioner_tag"] = "is_forward"
            seed.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # drawn again, it would be another seed
        return seed


class Pass(Protocol):
    """A graph pass: a frozen dataclass whose fields are its options and, with its name, its cache key."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph, context: Context) -> bool:
        """Rewrite `graph` in place; say whether anything changed."""
        ...


Observer = Callable[[str, Graph], None]


def run(passes: Sequence[Pass], graph: Graph, context: Context, observer: Observer | None = None) -> None:
    """Run the passes in order; the graph is verified before the first and after each.

    observer: called with "captured" before the first pass and with each pass's name after it.
    """
    verify(graph, "captured")
    if observer:
        observer("captured", graph)
    for p in passes:
        changed = p.run(graph, context)
        log.debug("%s: %s", p.name, "changed the graph" if changed else "nothing to do")
        if changed:
            verify(graph, p.name)
        if observer:
            observer(p.name, graph)
    graph.eliminate_dead_code()
    graph.lint()
