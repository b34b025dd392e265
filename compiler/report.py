"""The coverage report: what each operand of each GEMM became, and why whatever stayed in high precision did."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table

from fp4.compiler.pipeline import Context
from fp4.compiler.policy import GemmPrecision
from fp4.compiler.sites import OPERANDS, ROLES

if TYPE_CHECKING:
    from fp4.kernels.target import Target

ABSENT = "absent"
KEPT = "high precision"


@dataclass
class GemmReport:
    """One GEMM: its operands after the rewrite, its rotation, and why it stayed in high precision if it did.

    emulated: on a GPU with block-scaled tensor cores, why they do not multiply this quantized GEMM's operands as they are; else
    empty.
    fp8: where FP8 tensor cores multiply its operands, of MXFP4 or of FP8 with block scales, the format of each, "e5m2", "e4m3";
    else empty.
    output: "fp32" where the policy asked for that result and it is; else empty, the dtype that the model has.
    """

    role: str
    operands: dict[str, str]
    rotation: str
    reason: str
    emulated: str = ""
    fp8: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def quantized(self) -> bool:
        return any(v not in (KEPT, ABSENT) for v in self.operands.values())

    @property
    def result(self) -> str:
        """Says so where the policy has changed the result's dtype."""
        return "result in FP32" if self.output else ""

    def outside(self, linear: str) -> dict[str, tuple[int, int]]:
        """Operand -> its elements outside FP8's reach, and all that were multiplied in FP8, of this process so far.

        Of every linear of this name: counts are kept by name. Empty where the operands are FP8: nothing of them is rounded.
        """
        from fp4.passes.lower_fp8 import counter
        from fp4.runtime import counters

        if not self.fp8 or not any(o.startswith("mxfp4") for o in self.operands.values()):
            return {}
        counts = {name: counters.count(counter(f"{linear} {self.role}", i)) for i, name in enumerate(self.operands)}
        return {name: count for name, count in counts.items() if count is not None}


@dataclass
class LinearReport:
    name: str
    module_type: str
    m: int | None
    n: int | None
    k: int | None
    dtype: str
    gemms: list[GemmReport]


@dataclass
class GraphReport:
    """One compiled graph. `failures`: what the policy asked for and could not be done."""

    policy: str
    kind: str  # training or inference
    linears: list[LinearReport] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)  # reason -> products tied to no linear
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    from_cache: bool = False


@dataclass(frozen=True)
class TensorCores:
    """What a graph is lowered for. target: the architecture with block-scaled tensor cores, or None. kernels: they are used.
    library: its products are cuBLAS's. fp8: MXFP4 operands are multiplied in FP8. fp8_blocks: so are FP8 operands with FP32
    block scales."""

    target: Target | None = None
    kernels: bool = True
    library: bool = False
    fp8: bool = False
    fp8_blocks: bool = False


def describe(context: Context, kind: str, cores: TensorCores = TensorCores()) -> GraphReport:
    """The report of the graph whose passes have just run."""
    linears = []
    failures = []
    for linear, decision in zip(context.linears, context.decisions, strict=True):
        gemms = []
        for role in ROLES:
            precision = decision.precision.gemms()[role]
            names = OPERANDS[role]
            if role not in linear.gemms:
                reason = linear.missing.get(role, "inference" if kind == "inference" else "no gradient is asked for")
                if precision.quantized and role in linear.missing:
                    failures.append(f"{linear.site.name} {role}: {reason}")
                gemms.append(GemmReport(str(role), dict.fromkeys(names, ABSENT), "", reason))
                continue
            operands = {
                name: str(o) if o.rewritten else KEPT
                for name, o in zip(names, (precision.first, precision.second), strict=True)
            }
            reason = "" if precision.quantized else decision.reason or f"the policy {context.policy.name} leaves it"
            dtype = linear.gemms[role].node.meta["val"].dtype
            why, fp8 = _multiplied(precision, cores, bool(linear.experts), dtype) if precision.quantized else ("", [])
            output = precision.output if dtype == torch.float32 else ""
            gemms.append(GemmReport(str(role), operands, str(precision.rotation or ""), reason, why, fp8, output))
        s = linear.site
        linears.append(LinearReport(s.name, s.module_type, s.m, s.n, s.k, s.dtype, gemms))
    unknown = Counter(gemm.reason for gemm in context.unknown)
    return GraphReport(context.policy.name, kind, linears, dict(unknown), list(context.warnings), failures)


def _multiplied(precision: GemmPrecision, cores: TensorCores, experts: bool, dtype: torch.dtype) -> tuple[str, list[str]]:
    """`emulated` and `fp8` of a quantized GEMM. experts: it is one product a group of rows. dtype: of the result."""
    from fp4.passes.lower_blackwell import emulated
    from fp4.passes.lower_fp8 import formats

    if experts or not cores.kernels:
        what = "the experts' operands are decoded" if cores.kernels else "kernels=False decodes all operands"
        return what if cores.target is not None else "", []
    pair = precision.first.quantizer, precision.second.quantizer
    why = emulated(*pair, cores.target, cores.library, dtype) if cores.target is not None else ""
    return why, list(formats(*pair, cores.fp8_blocks)) if cores.fp8 else []


@dataclass
class Report:
    """The reports of a model's graphs, and its linears that no graph captured."""

    graphs: list[GraphReport]
    uncaptured: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @property
    def failures(self) -> list[str]:
        """What was asked for and not done: products tied to no linear are not, uncaptured linears are."""
        return [f for g in self.graphs for f in g.failures] + [f"{n}: no compiled graph captured it" for n in self.uncaptured]

    def count(self, role: str) -> int:
        """How many GEMMs of a role are quantized."""
        return sum(g.quantized for graph in self.graphs for x in graph.linears for g in x.gemms if g.role == role)

    def table(self) -> Table:
        """One row a GEMM, for ``rich``."""
        table = Table("linear", "(M, N, K)", "GEMM", "first operand", "second operand", "rotation", "why not")
        for graph in self.graphs:
            table.title = f"policy {graph.policy}, {graph.kind}" + (" (from the compile cache)" if graph.from_cache else "")
            for linear in graph.linears:
                size = str(tuple(x if x is not None else "?" for x in (linear.m, linear.n, linear.k))).replace("'", "")
                for i, gemm in enumerate(linear.gemms):
                    cells = [escape(f"{name} {value}") for name, value in gemm.operands.items()]
                    table.add_row(
                        *((linear.name, size) if i == 0 else ("", "")),
                        gemm.role,
                        *cells,
                        escape(gemm.rotation),
                        escape(gemm.reason or _note(linear.name, gemm)),
                        end_section=i == len(linear.gemms) - 1,
                    )
            for reason, n in graph.unknown.items():
                table.add_row(f"{n} other product{'s' * (n > 1)}", "", "", "", "", "", escape(reason), end_section=True)
        for name in self.uncaptured:
            table.add_row(name, "", "", "", "", "", "no compiled graph captured it")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def _note(linear: str, gemm: GemmReport) -> str:
    """How a quantized GEMM is multiplied, where that is to be known."""
    parts = (f"emulated: {gemm.emulated}" if gemm.emulated else _in_fp8(linear, gemm), gemm.result)
    return "; ".join(filter(None, parts))


def _in_fp8(linear: str, gemm: GemmReport) -> str:
    if not gemm.fp8:
        return ""
    counts = gemm.outside(linear)
    said = [f"{name} {n} of {total:.2g} elements" for name, (n, total) in counts.items() if n]
    below = f"; rounded, far below the largest: {', '.join(said)}" if said else "; all exact" if counts else ""
    return f"multiplied in FP8, {' x '.join(gemm.fp8)}{below}"


# Weights of these are in no matrix product, or, as a convolution's, in none that a policy speaks of.
_NOT_LINEAR = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.LayerNorm, torch.nn.modules.conv._ConvNd)


class Registry:
    """Graph reports of this process, found again by the parameters the graph reads."""

    def __init__(self) -> None:
        self._entries: list[tuple[GraphReport, list[weakref.ref[torch.Tensor]]]] = []
        self._called: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, report: GraphReport, parameters: Iterable[torch.Tensor]) -> None:
        self._entries.append((report, [weakref.ref(p) for p in parameters]))

    def called(self, parameters: Iterable[torch.Tensor]) -> None:
        """A graph was called with these: one made for a block serves all blocks like it."""
        self._called |= {id(p): weakref.ref(p) for p in parameters}

    def clear(self) -> None:
        self._entries.clear()
        self._called.clear()

    def find(self, model: torch.nn.Module) -> Report:
        gathered = _gathered(model)
        own = {id(p) for p in model.parameters()} | set(gathered)
        graphs: list[GraphReport] = []
        seen = {i for i, r in self._called.items() if r() is not None}
        for report, refs in self._entries:
            ids = {id(p) for r in refs if (p := r()) is not None}
            if ids & own:
                graphs.append(report)
                seen |= ids
        seen |= {sharded for whole, sharded in gathered.items() if whole in seen}
        return Report(graphs, list(_uncaptured(model, seen)))


def _gathered(model: torch.nn.Module) -> dict[int, int]:
    """FSDP2: the parameter that a graph reads, gathered -> the sharded one that the model shows."""
    found = {}
    for module in model.modules():
        get: Any = getattr(module, "_get_fsdp_state", None)
        state = get() if get else None
        groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [getattr(state, "_fsdp_param_group", None)])
        for group in groups:
            for p in group.fsdp_params:
                if (whole := getattr(p, "_unsharded_param", None)) is not None:
                    found[id(whole)] = id(p.sharded_param)
    return found


def _uncaptured(model: torch.nn.Module, seen: set[int]) -> Iterator[str]:
    """Names of the linears, and of other modules' matrices, that no graph reads."""
    for name, module in model.named_modules(remove_duplicate=True):
        if isinstance(module, _NOT_LINEAR) or name.startswith("_orig_mod._"):
            continue
        name = name.removeprefix("_orig_mod").removeprefix(".")
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and id(parameter) not in seen:
                yield f"{name}.{own}".removeprefix(".").removesuffix(".weight")


REGISTRY = Registry()


def report(compiled: Callable[..., Any]) -> Report:
    """What the compiler did to a model: every linear, its three GEMMs, each operand's precision, reasons for BF16.

    compiled: the result of ``torch.compile(model, backend="fp4")``, or the model itself, after its first call (and first
    backward, for graphs compiled then). Raises ValueError when no graph of the model has been compiled with this backend.
    """
    if not isinstance(compiled, torch.nn.Module):
        raise ValueError(f"fp4.report takes the compiled model, a torch.nn.Module; got {type(compiled).__name__}")
    found = REGISTRY.find(compiled)
    if not found.graphs:
        raise ValueError(
            'no graph of this model was compiled with backend="fp4" in this process: compile it and call it once, '
            "then ask again. If that was done, Dynamo gave up on it: TORCH_LOGS=graph_breaks says where"
        )
    return found
