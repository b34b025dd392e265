"""How much one precision change hurts a training step: its loss and gradient against those of the unquantized step.

The gradient is weighed as an optimizer like Adam takes it: every parameter's divided by its RMS in the unquantized step, and
errors that come out differently on every batch count less than those that persist, since its first moment averages the former
away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from fp4.compiler.explain.step import Capture, Captured, Loss, Outcome, Step, StepError
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.pipeline import Context
from fp4.compiler.policy import LinearPrecision, LinearSite, Policy

# Variance of an exponential average of independent draws over that of one: (1 - b) / (1 + b), with Adam's usual b = 0.9.
NOISE_WEIGHT = (1 - 0.9) / (1 + 0.9)


@dataclass(frozen=True)
class Effect:
    """What a policy does to the step, as shares of the unquantized gradient's squared norm (weighed, see above).

    loss: its loss less the unquantized one, mean over batches and seeds; not a share. error: squared error of one step's
    gradient. bias: the part of it that persists from batch to batch, from the products of different batches' errors (different
    seeds' where there is one batch); unbiased, so it may come out slightly below zero.
    """

    loss: float
    error: float
    bias: float

    @property
    def gradient(self) -> float:
        """Squared error of the gradient as a first moment with b = 0.9 sees it: the bias and 1/19 of the rest."""
        bias = min(max(self.bias, 0.0), self.error)
        return bias + NOISE_WEIGHT * (self.error - bias)


class Sensitivity:
    """The steps of a model on several batches, and their unquantized gradients.

    batches: as ``fp4.measure`` takes one. seeds: draws that a random policy's effect is averaged over, a batch.
    """

    def __init__(self, model: torch.nn.Module, batches: Iterable[Any], loss: Loss | None, seeds: int) -> None:
        capture = Capture(model, loss)
        self.steps = [capture(batch) for batch in batches]
        if not self.steps:
            raise StepError("no batch to measure on; pass several, such as batches=[batch, ...] of the training data")
        if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
            raise StepError(f"seeds={seeds!r}; write how many random draws to average over, such as 2")
        self.seeds = seeds
        plain = [step.run(graph) for step, graph, _ in self._graphs(Policy("bf16"))]
        if not plain[0].gradients:
            raise StepError("nothing in this step has a gradient: set requires_grad_(True) on what is trained")
        self._names = list(plain[0].gradients)
        squares = {n: sum(float(o.gradients[n].double().square().mean()) for o in plain) / len(plain) for n in self._names}
        self._weights = {n: 1 / math.sqrt(s) if 0 < s < math.inf else 0.0 for n, s in squares.items()}
        self._plain = [(self._flat(o), float(o.loss)) for o in plain]
        self._size = sum(float(g.square().sum()) for g, _ in self._plain) / len(plain)
        if not math.isfinite(self._size) or not self._size:
            raise StepError(
                "the unquantized step's gradient is zero or not finite, so nothing can be compared with it: "
                "fp4.measure(model, batch) names where NaN or Inf come from"
            )

    def sites(self) -> list[LinearSite]:
        """The linears of the first batch's graph."""
        _, _, context = next(iter(self._graphs(Policy("bf16"))))
        return [linear.site for linear in context.linears]

    def effect(self, policy: Policy) -> Effect:
        """Loss and gradient under a policy against the unquantized ones, over all batches and seeds."""
        errors: list[float] = []
        losses: list[float] = []
        means: list[Tensor] = []
        for number, (step, graph, _) in enumerate(self._graphs(policy)):
            wanted, loss = self._plain[number]
            draws = any(True for _ in fp4_nodes(graph, "seed"))
            differences = []
            for turn in range(self.seeds if draws else 1):
                outcome = step.run(graph, seed=0, draw=1 + number * self.seeds + turn)
                differences.append(self._flat(outcome) - wanted)
                losses.append(float(outcome.loss) - loss)
            errors += [float(d.square().sum()) for d in differences]
            means += [torch.stack(differences).mean(0)] if len(self.steps) > 1 else differences
        error = sum(errors) / len(errors)
        return Effect(sum(losses) / len(losses), error / self._size, _persistent(means, error) / self._size)

    def alone(self, precisions: dict[str, LinearPrecision]) -> Effect:
        """The effect of these linears' precisions, by name, every other linear left in high precision."""

        def decide(site: LinearSite) -> LinearPrecision:
            return precisions.get(site.name, LinearPrecision())

        return self.effect(Policy("alone", decide=decide))

    def _graphs(self, policy: Policy) -> Iterable[tuple[Step, Graph, Context]]:
        made: dict[Captured, tuple[Graph, Context]] = {}
        for step in self.steps:
            if step.captured not in made:
                made[step.captured] = step.captured.rewritten(policy)
            yield step, *made[step.captured]

    def _flat(self, outcome: Outcome) -> Tensor:
        return torch.cat([outcome.gradients[n].float().flatten() * self._weights[n] for n in self._names])


def _persistent(errors: Sequence[Tensor], error: float) -> float:
    """Squared norm of the errors' common mean: the mean product of two different ones. A single one is all bias."""
    count = len(errors)
    if count == 1:
        return error
    total = float(torch.stack(tuple(errors)).sum(0).square().sum())
    return (total - sum(float(e.square().sum()) for e in errors)) / (count * (count - 1))


BY: dict[str, Callable[[Effect], float]] = {"gradient": lambda e: e.gradient, "loss": lambda e: e.loss}
