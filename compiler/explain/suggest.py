"""A policy that writes itself: which GEMMs to keep in higher precision, by what their quantization does to loss or gradient.

Each candidate is quantized alone and its effect measured; under a budget, those are kept whose effect is largest for their
cost. Squared errors of different GEMMs add as far as they are independent; the result says what the whole measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table

from fp4.compiler.explain.measure import _finite
from fp4.compiler.explain.sensitivity import BY, Effect, Sensitivity
from fp4.compiler.explain.step import Loss, StepError, policy_of
from fp4.compiler.policy import BF16, GEMMS, GemmPrecision, LinearPrecision, LinearSite, Policy, Rule, keep, rule
from fp4.passes.recipes import DEFAULT, describe, recipe

# What a GEMM may be kept in, and what that costs, BF16 being 1. On tensor cores FP8 runs at half and BF16 at a quarter of FP4's
# rate: the time beyond FP4's is as 1 to 3. An element has 1 and 2 bytes in place of FP4's 1/2: as 1 to 3 again.
COSTS = {"bf16": 1.0, "fp8": 1 / 3, "mxfp8": 1 / 3}


@dataclass(frozen=True)
class Budget:
    """How much may be kept in higher precision: a share from 0 to 1 of the FLOPs, or of the operand bytes, of a training step.

    The whole is every GEMM that the policy quantizes. A GEMM kept in BF16 costs its share, one kept in FP8 a third of it
    (``COSTS``). Bytes are those of the GEMMs' operands as they are read.
    """

    flops: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.flops, self.bytes) if v is not None]
        if len(given) != 1 or isinstance(given[0], bool) or not isinstance(given[0], int | float) or not 0 <= given[0] <= 1:
            raise StepError(f"{self}: write one share from 0 to 1, such as fp4.Budget(flops=0.1) or fp4.Budget(bytes=0.1)")

    @property
    def share(self) -> float:
        return self.flops if self.flops is not None else self.bytes or 0.0

    def cost(self, site: LinearSite, gemm: str) -> float:
        """FLOPs or operand elements of one GEMM."""
        m, n, k = (size or 0 for size in (site.m, site.n, site.k))
        if self.flops is not None:
            return 2.0 * m * n * k
        return float({"fprop": m * k + n * k, "dgrad": m * n + n * k, "wgrad": m * n + m * k}[gemm])


@dataclass
class Candidate:
    """GEMMs that are kept together: one GEMM, or all of a linear.

    cost: share of the budget's whole when kept in BF16. effects: of these GEMMs alone, as the policy has them ("policy") and in
    each precision they may be kept in but BF16, whose effect is none. kept: the precision chosen, "" for the policy's.
    """

    linear: str
    gemms: tuple[str, ...]
    cost: float
    effects: dict[str, Effect]
    kept: str = ""

    def damage(self, by: str, precision: str = "policy") -> float:
        return max(0.0, BY[by](self.effects[precision])) if precision in self.effects else 0.0


@dataclass
class Suggestion:
    """What ``fp4.suggest`` proposes. ``str`` is the code to paste, ``table()`` the reasons.

    policy: the policy. code: Python that makes it, to be run after ``import fp4``; where a policy was given, not a recipe's
    name, it extends the variable `policy`. candidates: the most damage for its cost first. spent: share of the budget's whole
    that is kept. before, after: effects of the whole policy without and with what is kept, on the same batches.
    """

    policy: Policy
    code: str
    by: str
    budget: Budget
    spent: float
    candidates: list[Candidate]
    before: Effect
    after: Effect
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.code

    def title(self) -> str:
        unit, before, after = "FLOPs" if self.budget.flops is not None else "operand bytes", self.before, self.after
        return (
            f"{100 * self.spent:.1f} % of the {unit} kept (budget {100 * self.budget.share:.1f} %): loss {before.loss:+.3g} -> "
            f"{after.loss:+.3g}, gradient's squared error {before.gradient:.3g} -> {after.gradient:.3g} "
            f"({before.error:.3g} -> {after.error:.3g} in one step)"
        )

    def rows(self) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for c in self.candidates:
            e = c.effects["policy"]
            figures = (f"{100 * c.cost:.2f} %", f"{e.loss:+.2g}", f"{e.error:.2g}", f"{e.bias:.2g}", f"{c.damage(self.by):.2g}")
            found.append((c.linear, ", ".join(c.gemms), *figures, c.kept))
        return found

    def table(self) -> Table:
        """For ``rich``: a row a candidate, the effect of quantizing it alone."""
        table = Table("linear", "GEMMs", "cost", "loss", "error", "bias", "damage", "kept in", title=self.title())
        for column in table.columns[2:7]:
            column.justify = "right"
        for row in self.rows():
            table.add_row(*map(escape, row))
        return table

    def __rich__(self) -> Table:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the policy object, as JSON has it."""
        shown = {k: v for k, v in vars(self).items() if k != "policy"}
        shown |= {"budget": asdict(self.budget), "candidates": [asdict(c) for c in self.candidates]}
        return _finite(shown | {"before": asdict(self.before), "after": asdict(self.after)})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def suggest(
    model: torch.nn.Module,
    batches: Iterable[Any],
    recipe: str | Policy = DEFAULT,
    budget: float | Budget = 0.1,
    *,
    to: str | Sequence[str] = "bf16",
    per: str | None = None,
    by: str = "gradient",
    loss: Loss | None = None,
    phase: str | None = None,
    seeds: int = 2,
) -> Suggestion:
    """Propose which GEMMs of a recipe to keep in higher precision under a budget, from their effect on this model now.

    model, loss, phase: as for ``fp4.measure``.
    batches: some of the training data, at least two to tell bias from noise, of one shape (each shape is captured anew).
    recipe: a name, whose own tail of BF16 linears is then left out for the budget to replace; or a policy, taken as it is.
        Linears that its rules keep stay kept and cost nothing.
    budget: a share of the FLOPs, or a ``Budget``.
    to: "bf16", "fp8", "mxfp8", or several to choose from, for each candidate.
    per: "gemm" or "linear"; None: by GEMM, or by linear where the backward reads the forward's copies.
    by: "gradient", the squared error of the gradient (``Effect.gradient``), or "loss", its change, which only fprop has.
    seeds: draws averaged over, a batch, for a candidate that is random.

    Costs a step in eager mode for each candidate, batch, seed and precision, and holds a few FP32 gradients for each batch.
    Raises StepError, PolicyError.
    """
    budget = budget if isinstance(budget, Budget) else Budget(flops=budget)
    to = (to,) if isinstance(to, str) else tuple(to)
    _check_choices(to, per, by)
    base, name = _base(recipe, phase)
    measured = Sensitivity(model, batches, loss, seeds)
    sites = measured.sites()
    decisions, warnings = base.assign(sites)
    precisions = {site.name: d.precision for site, d in zip(sites, decisions, strict=True)}
    candidates = _candidates(sites, precisions, budget, _granularity(per, base, precisions))
    for c in candidates:
        for choice, whole in {"policy": precisions[c.linear], **{t: _kept_in(t) for t in to if t != "bf16"}}.items():
            c.effects[choice] = measured.alone({c.linear: whole.only(c.gemms)})
    candidates.sort(key=lambda c: c.damage(by) / c.cost if c.cost else math.inf, reverse=True)
    spent = _choose(candidates, to, by, budget.share)
    rules, lines = _rules(candidates, precisions)
    policy = base.with_rules(*rules) if rules else base
    start, end = (f"policy = {name}", "") if not rules else (f"policy = {name}.with_rules(\n", ")\n")
    code = start + "".join(f"    {line},\n" for line in lines) + end
    before = measured.effect(base)
    after = measured.effect(policy) if rules else before
    return Suggestion(policy, code, by, budget, spent, candidates, before, after, warnings)


def _check_choices(to: tuple[str, ...], per: str | None, by: str) -> None:
    if unknown := [t for t in to if t not in COSTS]:
        raise StepError(f"to={unknown[0]!r}: write one or more of {', '.join(map(repr, COSTS))}")
    if not to:
        raise StepError("to=(): write what to keep GEMMs in, such as to='bf16' or to=('fp8', 'bf16')")
    if per not in (None, "gemm", "linear"):
        raise StepError(f"per={per!r}: write 'gemm' or 'linear'")
    if by not in BY:
        raise StepError(f"by={by!r}: write one of {', '.join(map(repr, BY))}")


def _base(given: str | Policy, phase: str | None) -> tuple[Policy, str]:
    """The policy to start from, and the code for it."""
    if not isinstance(given, str):
        return policy_of(given, phase), "policy" if phase is None else f"policy.phase({phase!r})"
    tail = "high_precision_tail" in describe(given).flags
    base = recipe(given, high_precision_tail=0.0) if tail else recipe(given)
    code = f"fp4.recipe({given!r}, high_precision_tail=0.0)" if tail else f"fp4.recipe({given!r})"
    code = code.replace("'", '"')
    return (base, code) if phase is None else (base.phase(phase), f'{code}.phase("{phase}")')


def _granularity(per: str | None, base: Policy, precisions: dict[str, LinearPrecision]) -> str:
    copies = any(p.dgrad.second.source == "forward" or p.wgrad.second.source == "forward" for p in precisions.values())
    if per == "gemm" and copies:
        raise StepError(
            f"per='gemm', and in {base.name} the backward reads the forward's quantized copies: a BF16 fprop leaves none. "
            "Write per='linear', or a recipe that quantizes from the original (requantize=False where the recipe has it)"
        )
    return per or ("linear" if copies else "gemm")


def _candidates(
    sites: Sequence[LinearSite], precisions: dict[str, LinearPrecision], budget: Budget, per: str
) -> list[Candidate]:
    costs: dict[tuple[str, str], float] = {}
    for site in sites:  # a linear called twice has two sites and one name, and rules go by name
        for gemm, precision in precisions[site.name].gemms().items():
            if gemm in site.roles and precision.quantized:
                costs[site.name, gemm] = costs.get((site.name, gemm), 0.0) + budget.cost(site, gemm)
    whole = sum(costs.values())
    if not whole:
        raise StepError("the policy quantizes no GEMM of this model: there is nothing to keep. Name another recipe")
    groups: dict[Any, list[str]] = {}
    for linear, gemm in costs:
        groups.setdefault((linear, gemm if per == "gemm" else ""), []).append(gemm)
    return [
        Candidate(linear, tuple(gemms), sum(costs[linear, g] for g in gemms) / whole, {})
        for (linear, _), gemms in groups.items()
    ]


def _kept_in(choice: str) -> LinearPrecision:
    return LinearPrecision() if choice == "bf16" else recipe(choice).precision


def _choose(candidates: Sequence[Candidate], to: Sequence[str], by: str, share: float) -> float:
    """Keep those candidates, each in one of the precisions, that leave the least damage at a cost of up to `share`.

    The multiple-choice knapsack by dynamic programming, costs rounded up to 1/20000 of the budget. Returns what is spent.
    """
    units = 20_000
    left = np.zeros(units + 1)  # least damage of the candidates so far, by units spent at most
    chosen = np.zeros((len(candidates), units + 1), dtype=np.int8)
    prices = [[math.ceil(c.cost * COSTS[t] / share * units - 1e-6) if share else units + 1 for t in to] for c in candidates]
    for row, c in enumerate(candidates):
        best = left + c.damage(by)
        for option, (t, price) in enumerate(zip(to, prices[row], strict=True), 1):
            if price <= units:
                kept = np.concatenate([np.full(price, np.inf), left[: units + 1 - price] + c.damage(by, t)])
                chosen[row, kept < best] = option
                best = np.minimum(kept, best)
        left = best
    at, spent = units, 0.0
    for row in reversed(range(len(candidates))):
        if option := chosen[row, at]:
            candidates[row].kept = to[option - 1]
            at -= prices[row][option - 1]
            spent += candidates[row].cost * COSTS[to[option - 1]]
    return spent


def _rules(candidates: Sequence[Candidate], precisions: dict[str, LinearPrecision]) -> tuple[list[Rule], list[str]]:
    """The rules that keep what is kept, and the code of each: linears that keep the same share one."""
    kept: dict[str, dict[str, str]] = {}
    for c in candidates:
        if c.kept:
            kept.setdefault(c.linear, {}).update(dict.fromkeys(c.gemms, c.kept))
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for linear in (name for name in precisions if name in kept):  # in execution order
        chosen = kept[linear]
        all_bf16 = all(chosen.get(g) == "bf16" for g, p in precisions[linear].gemms().items() if p.quantized)
        key = () if all_bf16 else tuple((g, chosen[g]) for g in GEMMS if g in chosen)
        alike.setdefault(key, []).append(_pattern(linear))
    rules, lines = [], []
    for key, patterns in sorted(alike.items()):
        given: dict[str, GemmPrecision] = {g: BF16 if t == "bf16" else _kept_in(t).gemms()[g] for g, t in key}
        rules.append(rule(*patterns, **given) if key else keep(*patterns))
        written = [f'"{p}"' for p in patterns]
        written += [f"{g}=fp4.BF16" if t == "bf16" else f'{g}=fp4.recipe("{t}").precision.{g}' for g, t in key]
        call, line = ("fp4.rule", ", ".join(written)) if key else ("fp4.keep", ", ".join(written))
        if len(line) > 100:
            line = "\n        " + ",\n        ".join(written) + ",\n    "
        lines.append(f"{call}({line})")
    return rules, lines


def _pattern(name: str) -> str:
    """The name as a glob that matches itself alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
