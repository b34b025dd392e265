"""The hook into AOTAutograd: one pass over the joint graph, one over each graph after partitioning.

Both are ``CustomGraphPass`` objects: immutable, with a content hash as ``uuid``, the one kind of hook that is inside the
FX-graph and the AOTAutograd cache keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fp4.compiler import pipeline
from fp4.compiler.explain import fx
from fp4.compiler.lowering import DEFAULTS, LoweringOptions
from fp4.compiler.pipeline import Context, Observer
from fp4.compiler.policy import Policy
from fp4.compiler.report import GraphReport, describe
from fp4.compiler.shards import Shard
from fp4.compiler.sites import Input, find_products

_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("compiler", "passes", "runtime", "kernels")
_hashed: dict[Path, tuple[tuple[int, int], bytes]] = {}


def source_digest() -> str:
    """A hash of our own sources, read again when a file changes: what we insert is not in the graph Dynamo hashed."""
    total = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if _hashed.get(path, (None,))[0] != version:
                _hashed[path] = version, hashlib.sha256(path.read_bytes()).digest()
            total.update(path.name.encode() + _hashed[path][1])
    return total.hexdigest()


@dataclass(frozen=True, eq=False)
class JointPass(CustomGraphPass):
    """Runs the passes on a joint (or inference) graph. `done` receives the report; it is not part of the key."""

    policy: Policy
    inputs: dict[int, Input]
    save_weights: bool
    strict: bool
    done: Callable[[GraphReport], None]
    observer: Observer | None = None
    batch: Shard | None = None
    tensor_group: str = ""
    lowering: LoweringOptions = DEFAULTS

    def __call__(self, graph: Graph) -> None:
        if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
            return  # the backward again, already rewritten
        if not any("fp4" not in node.meta for node in find_products(graph)):
            return
        from fp4.passes import JOINT_PASSES

        context = self.context()
        _trace_graph("captured", graph, self.inputs)
        pipeline.run(JOINT_PASSES, graph, context, self.observer)
        training = any("partitioner_tag" in node.meta for node in graph.nodes)
        report = describe(context, "training" if training else "inference", self.lowering.tensor_cores(graph))
        _trace_graph("rewritten", graph, self.inputs)
        _trace(report)
        self.done(report)
        if self.strict and report.failures:
            raise StrictError(
                "strict=True, and the policy asked for what could not be done:\n  "
                + "\n  ".join(report.failures)
                + "\nWrite a rule that keeps these linears (fp4.keep), or leave out strict"
            )

    def context(self) -> Context:
        """What the passes of one graph share, made anew for each graph."""
        return Context(self.policy, self.inputs, self.save_weights, self.batch, self.tensor_group)

    def uuid(self) -> Any | None:
        policy = self.policy.digest()
        if policy is None or self.observer is not None:
            return None  # an unhashable policy, or someone watching: compile anew
        inputs = f"{sorted(self.inputs.items())} {self.batch} {self.tensor_group}"
        options = f"{self.save_weights} {self.strict} {self.lowering}"
        key = f"{policy} {inputs} {options} {source_digest()} {torch.__version__}"
        return hashlib.sha256(key.encode()).hexdigest()


class StrictError(RuntimeError):
    """strict=True and something the policy asked for was not done."""


@dataclass(frozen=True, eq=False)
class LowerPass(CustomGraphPass):
    """Lowers the ``fp4::`` ops of a forward, backward or inference graph for the device it runs on."""

    options: LoweringOptions = DEFAULTS

    def __call__(self, graph: Graph) -> None:
        from fp4.passes import lowering

        for p in lowering(self.options):
            p.run(graph)
        graph.lint()

    def uuid(self) -> Any | None:
        return hashlib.sha256(f"{self.options} {source_digest()} {torch.__version__}".encode()).hexdigest()


def _trace(report: GraphReport) -> None:
    """The report as an artifact of torch's structured trace, where tlparse shows it."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fp4_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(asdict(report), indent=1),
    )


def _trace_graph(stage: str, graph: Graph, inputs: dict[int, Input]) -> None:
    """The joint graph's code as an artifact of torch's structured trace; nothing is written where none is asked for."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"fp4_{stage}", "encoding": "string"},
        payload_fn=lambda: fx.code(graph, stage, inputs),
    )
