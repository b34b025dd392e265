"""Policies: which precision each operand of each GEMM of each linear gets.

A linear op has three GEMMs. With X (M, K) activations, W (N, K) weights, dY (M, N):

    fprop  Y  = X W^T     contracts K     operands X, W
    dgrad  dX = dY W      contracts N     operands dY, W
    wgrad  dW = dY^T X    contracts M     operands dY, X

A policy maps each ``LinearSite`` to a ``LinearPrecision``. It is a frozen value: equality, hash, pickle and ``digest()``,
so that Dynamo's guards and the compile caches tell policies apart.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp4.runtime.spec import MXFP4, Quantizer, Rotation, SpecError

GEMMS = ("fprop", "dgrad", "wgrad")
SOURCES = ("original", "forward")
OUTPUTS = ("", "fp32")
# Language-model heads and MoE routers, as the usual model codes name them.
HEADS = ("lm_head", "*.lm_head", "output", "*.output_projection", "*.embed_out", "embed_out", "*.router", "*.gate")


class PolicyError(ValueError):
    """A policy that contradicts itself or is of the wrong type; the message says what to write instead."""


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM: its quantizer, or None to leave it in high precision.

    source: "original", the tensor the model has; or "forward", what fprop multiplied: its codes, decoded. A backward operand
        quantized from that copy makes the gradient that of the function computed (TetraJet 2502.20853, Quartet II 2601.22813),
        and forward saves its codes alone. W in dgrad and X in wgrad have one.
    clip_gradient: no gradient flows to the elements that the quantizer clipped (the clip mask of QuEST, Quartet 2505.14669).
        On fprop's operands, with an MXFP4 quantizer.
    """

    quantizer: Quantizer | None = None
    source: str = "original"
    clip_gradient: bool = False

    def __post_init__(self) -> None:
        q = self.quantizer
        if q is not None and not isinstance(q, Quantizer):
            raise PolicyError(f"Operand(quantizer={q!r}): write a quantizer such as fp4.NVFP4(), or None")
        if self.source not in SOURCES:
            raise PolicyError(f"Operand(source={self.source!r}): write one of {', '.join(SOURCES)}")
        if self.clip_gradient and not (isinstance(q, MXFP4) and q.prescale == 1):
            raise PolicyError(
                f"clip_gradient=True with {q}: the mask is |x| < 6 * 2^E of a power-of-two scale. Write an fp4.MXFP4 quantizer "
                "without prescale, or clip_gradient=False"
            )

    @property
    def rewritten(self) -> bool:
        """Is the operand other than the model's own tensor?"""
        return self.quantizer is not None or self.source == "forward"

    def __str__(self) -> str:
        text = str(self.quantizer) if self.quantizer else "high precision"
        text += " of the forward copy" if self.source == "forward" else ""
        return text + (", gradient clipped" if self.clip_gradient else "")


def _operand(value: Operand | Quantizer | None, where: str) -> Operand:
    if isinstance(value, Operand):
        return value
    if value is None or isinstance(value, Quantizer):
        return Operand(value)
    raise PolicyError(f"{where}={value!r}: write an Operand, a quantizer such as fp4.NVFP4(), or None for high precision")


@dataclass(frozen=True, init=False)
class GemmPrecision:
    """Precision of one GEMM: a quantizer for each operand, and the rotation both share.

    first: X in fprop, dY in dgrad and wgrad. second: W in fprop and dgrad, X in wgrad. A bare quantizer or None is taken
    as an Operand. The rotation acts on both operands along the contracted dimension, so it cancels in the product.
    output: dtype of the result, "" as the model has it, or "fp32" in wgrad: where the parameter is FP32 and the model runs in
        BF16 (autocast), dW goes into the gradient without the rounding to BF16 before.
    """

    first: Operand
    second: Operand
    rotation: Rotation | None
    output: str

    def __init__(
        self,
        first: Operand | Quantizer | None = None,
        second: Operand | Quantizer | None = None,
        rotation: Rotation | None = None,
        output: str = "",
    ) -> None:
        object.__setattr__(self, "first", _operand(first, "first"))
        object.__setattr__(self, "second", _operand(second, "second"))
        object.__setattr__(self, "rotation", rotation)
        object.__setattr__(self, "output", output)
        if self.rotation is not None and not isinstance(self.rotation, Rotation):
            raise PolicyError(f"rotation={self.rotation!r}: write fp4.Rotation(size=16, signs='fixed'), or None")
        if self.first.source == "forward":
            raise PolicyError(
                "first=Operand(source='forward'): fprop's X, and dY, have no copy from forward. It is for `second`, W in dgrad "
                "and X in wgrad; leave it out here"
            )
        if self.rotation is not None and not self.quantized:
            raise PolicyError("a rotation with no quantized operand only costs time: give `first` or `second` a quantizer")
        if self.output not in OUTPUTS:
            raise PolicyError(f"output={self.output!r}: write 'fp32' (of wgrad), or '' for the dtype that the model has")
        if self.output and not self.quantized:
            raise PolicyError(
                f"output={self.output!r} with no quantized operand: the GEMM is the model's own, and so is its result. Give "
                "`first` or `second` a quantizer, or leave output out"
            )
        for operand in (self.first, self.second):
            q = operand.quantizer
            if q is not None and q.rounding == "ms_eden" and (self.rotation is None or self.rotation.signs != "fresh"):
                raise SpecError(
                    "ms_eden is unbiased over random rotations only; with fixed signs or none its error does not average "
                    "out. Write rotation=fp4.Rotation(size=128, signs='fresh', bf16=False)"
                )

    @property
    def quantized(self) -> bool:
        return self.first.rewritten or self.second.rewritten

    def __str__(self) -> str:
        text = f"{self.first} x {self.second}"
        text += f", both rotated by {self.rotation}" if self.rotation else ""
        return text + (", result in FP32" if self.output else "")


BF16 = GemmPrecision()  # a GEMM left in high precision: the dtype the model gives it


@dataclass(frozen=True)
class LinearPrecision:
    """Precision of the three GEMMs of a linear. The default is high precision in all three."""

    fprop: GemmPrecision = BF16
    dgrad: GemmPrecision = BF16
    wgrad: GemmPrecision = BF16

    def __post_init__(self) -> None:
        for name, gemm in self.gemms().items():
            if not isinstance(gemm, GemmPrecision):
                raise PolicyError(f"{name}={gemm!r}: write a GemmPrecision, or fp4.BF16 to leave this GEMM alone")
        if self.fprop.second.source == "forward":
            raise PolicyError("fprop second=Operand(source='forward'): fprop makes that copy; write source='original'")
        for name, result in (("fprop", "Y"), ("dgrad", "dX")):
            if output := self.gemms()[name].output:
                raise PolicyError(
                    f"{name} output={output!r}: what reads {result} expects the dtype that the model has; only dW goes into an "
                    "FP32 gradient. Write output='fp32' in wgrad, or leave it out"
                )
        for name, letter, forward in (("dgrad", "W", self.fprop.second), ("wgrad", "X", self.fprop.first)):
            gemm = self.gemms()[name]
            if gemm.first.clip_gradient or gemm.second.clip_gradient:
                raise PolicyError(f"{name}: clip_gradient is said of fprop's operands; write it there")
            if gemm.second.source == "forward" and forward.quantizer is None:
                raise PolicyError(
                    f"{name} reads the forward copy of {letter}, and fprop leaves {letter} in high precision: there is none. "
                    f"Give fprop's {letter} a quantizer, or write source='original'"
                )
            if forward.clip_gradient and self.fprop.rotation is not None and gemm.second.source != "forward":
                raise PolicyError(
                    f"fprop rotates {letter} and clips its gradient, so the mask is of the rotated elements, and {name} is not "
                    f"in that space. Write {name} second=Operand(..., source='forward'), or clip_gradient=False"
                )

    def gemms(self) -> dict[str, GemmPrecision]:
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def quantized(self) -> bool:
        return any(g.quantized for g in self.gemms().values())

    def only(self, gemms: Sequence[str], rest: LinearPrecision | None = None) -> LinearPrecision:
        """The named GEMMs (of "fprop", "dgrad", "wgrad") of this precision, the others of `rest` (BF16 when None)."""
        if unknown := [g for g in gemms if g not in GEMMS] or isinstance(gemms, str):
            raise PolicyError(f"gemms={gemms!r}: {unknown} is no GEMM; write some of {GEMMS}")
        chosen = {name: gemm for name, gemm in self.gemms().items() if name in gemms}
        return dataclasses.replace(rest or LinearPrecision(), **chosen)


@dataclass(frozen=True)
class LinearSite:
    """What a policy may know of one linear op of the captured graph.

    name: the weight's fully qualified name without ``.weight`` (``model.layers.0.mlp.down_proj``); where the weight is tied
        to another module's, the linear's.
    index, count: position in execution order, and how many linears the graph has.
    m, n, k: tokens, output features, input features; None where the size is dynamic.
    dtype: of the GEMM's operands. module_type: class name of the innermost module. depth: dots in the name.
    roles: which of fprop, dgrad, wgrad exist (a frozen weight has no wgrad).
    """

    name: str
    index: int
    count: int
    m: int | None
    n: int | None
    k: int | None
    dtype: str
    module_type: str
    roles: tuple[str, ...]

    @property
    def depth(self) -> int:
        return self.name.count(".")


@dataclass(frozen=True)
class Rule:
    """Changes the precision of the linears it matches. Made by ``keep``, ``keep_last`` and ``rule``."""

    text: str
    patterns: tuple[str, ...] = ()
    last: float | None = None
    fprop: GemmPrecision | None = None
    dgrad: GemmPrecision | None = None
    wgrad: GemmPrecision | None = None
    optional: bool = False  # part of a recipe: matching nothing is no news

    def changed(self, precision: LinearPrecision) -> LinearPrecision:
        new = {name: getattr(self, name) for name in GEMMS if getattr(self, name) is not None}
        return dataclasses.replace(precision, **new)


def _check_patterns(call: str, patterns: tuple[Any, ...]) -> None:
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise PolicyError(f"{call} takes globs on parameter names, such as 'lm_head' or '*.down_proj'; got {patterns!r}")


def _immutable(self: Any, name: str, value: Any = None) -> None:
    way_out = {
        Policy: "policy.with_rules(fp4.rule(...)) or policy.with_phase(...)",
        Rule: "another fp4.rule(...) or fp4.keep(...)",
    }.get(type(self), f"dataclasses.replace(old, {name}=...), or a new {type(self).__name__}")
    raise PolicyError(
        f"{type(self).__name__}.{name} cannot be changed: a policy is a value, and compiled graphs are kept by it. "
        f"Write {way_out}, and compile with the result"
    )


def keep(*patterns: str, optional: bool = False) -> Rule:
    """Leave the linears whose name matches one of the anchored globs in high precision, all three GEMMs.

    A name is the weight's, without ``.weight``; ``*`` also spans dots. optional: don't warn when nothing matches.
    """
    _check_patterns("fp4.keep", patterns)
    text = f"keep({', '.join(map(repr, patterns))})"
    return Rule(text, patterns=patterns, fprop=BF16, dgrad=BF16, wgrad=BF16, optional=optional)


def keep_last(fraction: float) -> Rule:
    """Leave the last ``ceil(fraction * n)`` of the n linears that no earlier rule kept in high precision.

    Execution order of the captured graph (NVIDIA 2509.25149, section 4.1: the last layers are the sensitive ones). With
    per-block compilation a graph is one block: name the layers with ``keep`` there.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise PolicyError(f"fp4.keep_last({fraction!r}): write a fraction of the linears from 0 to 1, such as 0.15")
    return Rule(f"keep_last({fraction})", last=float(fraction), fprop=BF16, dgrad=BF16, wgrad=BF16, optional=True)


def usual_rules(keep_heads: bool, high_precision_tail: float) -> tuple[Rule, ...]:
    """What a recipe keeps in BF16: language-model head and MoE routers, and the last share of the other linears."""
    heads = (dataclasses.replace(keep(*HEADS, optional=True), text="keep heads and routers"),) if keep_heads else ()
    return (*heads, keep_last(high_precision_tail))


def rule(
    *patterns: str,
    fprop: GemmPrecision | None = None,
    dgrad: GemmPrecision | None = None,
    wgrad: GemmPrecision | None = None,
) -> Rule:
    """Give the named GEMMs of the linears matching one of the anchored globs another precision; None leaves a GEMM."""
    _check_patterns("fp4.rule", patterns)
    given = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    changed = [k for k, v in given.items() if v is not None]
    if not changed:
        raise PolicyError(f"fp4.rule({patterns[0]!r}) changes nothing: give fprop=, dgrad= or wgrad=, e.g. wgrad=fp4.BF16")
    for name in changed:
        if not isinstance(given[name], GemmPrecision):
            raise PolicyError(f"fp4.rule({patterns[0]!r}, {name}={given[name]!r}): write a GemmPrecision or fp4.BF16")
    text = f"rule({', '.join(map(repr, patterns))}: {', '.join(changed)})"
    return Rule(text, patterns=patterns, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


@dataclass(frozen=True)
class Decision:
    """What a policy decided for one site, and the rule that left it in high precision, if one did."""

    precision: LinearPrecision
    reason: str = ""


@dataclass(frozen=True)
class Policy:
    """A precision for every linear, changed by rules in order; or a function of the site.

    name: shown in reports. precision: what a linear gets unless a rule changes it. decide: a function from LinearSite to
    LinearPrecision in place of `precision` (made by ``@fp4.policy``); rules still apply after it. phases: named policies to
    switch to in the middle of a run.
    """

    name: str
    precision: LinearPrecision = LinearPrecision()
    rules: tuple[Rule, ...] = ()
    decide: Callable[[LinearSite], LinearPrecision] | None = field(default=None)
    phases: tuple[tuple[str, Policy], ...] = ()

    def with_rules(self, *rules: Rule) -> Policy:
        """This policy with more rules after its own, and after those of its phases. Later rules win."""
        for r in rules:
            if not isinstance(r, Rule):
                raise PolicyError(f"with_rules takes fp4.keep(...), fp4.keep_last(...) or fp4.rule(...); got {r!r}")
        phases = tuple((name, phase.with_rules(*rules)) for name, phase in self.phases)
        return dataclasses.replace(self, rules=self.rules + rules, phases=phases)

    def phase(self, name: str) -> Policy:
        """The policy of a named phase. Raises PolicyError for an unknown name, listing the known ones."""
        found = dict(self.phases)
        if name not in found:
            known = ", ".join(found) or "none"
            raise PolicyError(
                f"policy {self.name} has no phase {name!r}; its phases: {known}. with_phase(name, policy) adds one"
            )
        return found[name]

    def with_phase(self, name: str, policy: Policy) -> Policy:
        """This policy with a phase more (or another policy for one): what ``fp4.switch`` and a training schedule name."""
        if not isinstance(policy, Policy):
            raise PolicyError(f"with_phase({name!r}, {policy!r}): write an fp4.Policy, such as fp4.recipe('bf16')")
        named = dataclasses.replace(policy, name=f"{self.name}:{name}", phases=())
        return dataclasses.replace(self, phases=(*((n, p) for n, p in self.phases if n != name), (name, named)))

    def assign(self, sites: Sequence[LinearSite]) -> tuple[list[Decision], list[str]]:
        """The decision for each site, and warnings (a rule that matched nothing)."""
        decisions = [Decision(self._first(site)) for site in sites]
        decisions = [
            d if d.precision.quantized else Decision(d.precision, f"the policy {self.name} leaves it") for d in decisions
        ]
        warnings = []
        for r in self.rules:
            if r.last is not None:
                open_ = [i for i, d in enumerate(decisions) if d.precision.quantized]
                chosen = open_[len(open_) - math.ceil(r.last * len(open_)) :]
            else:
                chosen = [i for i, s in enumerate(sites) if any(matches(s.name, p) for p in r.patterns)]
            if not chosen and not r.optional:
                names = ", ".join(s.name for s in sites[:4]) + (", ..." if len(sites) > 4 else "")
                warnings.append(f"{r.text} matches no linear of this graph; its linears: {names}")
            for i in chosen:
                try:
                    decisions[i] = Decision(r.changed(decisions[i].precision), r.text)
                except PolicyError as error:
                    raise PolicyError(f"{sites[i].name}, {r.text}: {error}") from None
        return decisions, warnings

    def _first(self, site: LinearSite) -> LinearPrecision:
        if self.decide is None:
            return self.precision
        precision = self.decide(site)
        if not isinstance(precision, LinearPrecision):
            raise PolicyError(f"policy {self.name} returned {precision!r} for {site.name}; return an fp4.LinearPrecision")
        return precision

    def digest(self) -> str | None:
        """A hash of everything the policy decides by, or None when a function in it reads what cannot be hashed.

        None switches torch's compile caches off for this policy: better slow than a stale result.
        """
        parts = [self.name, repr(self.precision), repr(self.rules)]
        if self.decide is not None:
            frozen = _freeze(self.decide, set())
            if frozen is None:
                return None
            parts.append(frozen)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def policy(function: Callable[[LinearSite], LinearPrecision]) -> Policy:
    """Decorator: a policy from a function of the site."""
    if not callable(function):
        raise PolicyError(f"@fp4.policy decorates a function from fp4.LinearSite to fp4.LinearPrecision; got {function!r}")
    return Policy(getattr(function, "__name__", type(function).__name__), decide=function)


def matches(name: str, pattern: str) -> bool:
    """Does the anchored glob match the linear's name, or its parameter's full name?"""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f"{name}.weight", pattern)


def _freeze(value: Any, seen: set[int]) -> str | None:
    """Text that changes whenever the value's behaviour can: None when that cannot be known."""
    if id(value) in seen:
        return "<recursion>"
    if value is None or isinstance(value, bool | int | float | str | bytes | types.ModuleType | type):
        return repr(value)
    if isinstance(value, tuple | frozenset) or _is_frozen(value):
        items = sorted(value, key=repr) if isinstance(value, frozenset) else value
        children = items if isinstance(items, list | tuple) else list(vars(value).values())
        parts = [_freeze(v, seen) for v in children]
        return None if None in parts else f"{type(value).__qualname__}({', '.join(map(str, parts))})"
    if isinstance(value, types.BuiltinFunctionType):
        return repr(value.__qualname__)
    if not isinstance(value, types.FunctionType):
        return None
    seen = seen | {id(value)}
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return None
    names = inspect.getclosurevars(value)
    used = {**names.nonlocals, **names.globals, "": (value.__defaults__, tuple((value.__kwdefaults__ or {}).items()))}
    frozen = {k: _freeze(v, seen) for k, v in sorted(used.items())}
    return None if None in frozen.values() else source + repr(frozen)


def _is_frozen(value: Any) -> bool:
    return getattr(getattr(value, "__dataclass_params__", None), "frozen", False)


for _value in (Operand, GemmPrecision, LinearPrecision, LinearSite, Rule, Policy):
    _value.__setattr__ = _value.__delattr__ = _immutable  # type: ignore[method-assign]
