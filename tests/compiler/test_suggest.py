"""Suggested policies: what is measured, what is chosen, and whether the printed code is the policy that was meant."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.explain.sensitivity import Effect, Sensitivity
from fp4.compiler.explain.suggest import COSTS, Candidate, _choose, _pattern
from fp4.compiler.policy import LinearSite, matches
from tests.graphs import MLP, llama, rewritten

ALL = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)


def squares(model: Any, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def executed(found: fp4.Suggestion, **names: Any) -> fp4.Policy:
    """The policy that the printed code makes."""
    scope: dict[str, Any] = {"fp4": fp4, **names}
    exec(found.code, scope)
    return scope["policy"]


def kept(policy: fp4.Policy, sites: list[LinearSite]) -> dict[tuple[str, str], str]:
    """What every GEMM of every linear is under a policy."""
    decisions, warnings = policy.assign(sites)
    assert not warnings
    return {(s.name, g): str(p) for s, d in zip(sites, decisions, strict=True) for g, p in d.precision.gemms().items()}


def outliers() -> MLP:
    """An MLP in which quantizing b hurts most: weights that meet only zeros make the others of their blocks underflow."""
    torch.manual_seed(0)
    model = MLP()
    model.a.weight.data[::16] = 0
    model.b.weight.data[:, ::16] = 8.0
    return model


def test_effects_are_those_computed_by_hand() -> None:
    """One linear, fprop alone quantized: loss and gradient written out, weighed by each parameter's RMS."""
    torch.manual_seed(0)
    model, data = nn.Linear(64, 32), batches()
    policy = fp4.Policy("x", fp4.LinearPrecision(fp4.GemmPrecision(fp4.NVFP4(), fp4.NVFP4())))
    effect = Sensitivity(model, data, squares, seeds=2).effect(policy)
    w, b = model.weight.detach(), model.bias.detach()
    wq = fp4.quantize(w, fp4.NVFP4()).dequantize()
    plain: list[dict[str, Tensor]] = []
    changed: list[dict[str, Tensor]] = []
    losses = []
    for x in data:
        xq = fp4.quantize(x, fp4.NVFP4()).dequantize()
        y, yq = x @ w.t() + b, xq @ wq.t() + b
        for outputs, into in ((y, plain), (yq, changed)):
            dy = 2 * outputs / outputs.numel()
            into.append({"w": (dy.t() @ x).double(), "b": dy.sum(0).double()})
        losses.append(float(yq.square().mean() - y.square().mean()))
    rms = {n: math.sqrt(sum(float(g[n].square().mean()) for g in plain) / 3) for n in ("w", "b")}
    error = [torch.cat([((c[n] - p[n]) / rms[n]).flatten() for n in rms]) for p, c in zip(plain, changed, strict=True)]
    size = 64 * 32 + 32  # squared norm of a gradient whose every parameter has RMS 1
    assert effect.loss == pytest.approx(sum(losses) / 3, rel=1e-4)
    assert effect.error == pytest.approx(sum(float(e.square().sum()) for e in error) / 3 / size, rel=1e-3)
    products = [float(error[i] @ error[j]) for i, j in itertools.permutations(range(3), 2)]
    bias = sum(products) / 6 / size
    assert effect.bias == pytest.approx(bias, rel=1e-3, abs=1e-7)
    assert effect.gradient == pytest.approx(bias + (effect.error - bias) / 19, rel=1e-3)


def test_stochastic_noise_is_not_bias() -> None:
    """dgrad with stochastic rounding: one draw's error is noise; over seeds the persistent part is a small share of it."""
    torch.manual_seed(0)
    dy = fp4.NVFP4(rounding="stochastic", range_guard=True)
    noisy = fp4.Policy("sr", fp4.LinearPrecision(wgrad=fp4.GemmPrecision(dy, None)))
    biased = fp4.Policy("floor", fp4.LinearPrecision(wgrad=fp4.GemmPrecision(fp4.MXFP4(), None)))
    one = Sensitivity(MLP(), batches(1), squares, seeds=8)
    found = one.effect(noisy)
    assert abs(found.bias) < 0.1 * found.error
    assert one.effect(biased).bias == one.effect(biased).error  # deterministic, one batch: all of it may persist
    assert found.gradient < 0.2 * found.error


def test_noise_that_is_all_bias_counts_in_full() -> None:
    assert Effect(0, 0.5, 0.5).gradient == 0.5
    assert Effect(0, 0.5, 0.7).gradient == 0.5
    assert Effect(0, 0.5, -0.1).gradient == pytest.approx(0.5 / 19)


def test_what_hurts_most_is_kept_and_the_code_is_the_policy() -> None:
    model = outliers()
    found = fp4.suggest(model, batches(), ALL, budget=0.45, loss=squares, per="linear")
    assert [c.linear for c in found.candidates if c.kept] == ["b"]
    assert found.candidates[0].linear == "b"
    policy = executed(found, policy=ALL)
    assert policy == found.policy == ALL.with_rules(fp4.keep("b"))
    assert found.after.gradient < 0.6 * found.before.gradient
    # What the pasted policy does to the model is what was meant.
    compiled = rewritten(model, batches()[0], policy=policy)
    assert {g.name: [x.quantized for x in g.gemms] for g in compiled.report.linears} == {
        "a": [True, False, True],  # the batch needs no gradient
        "b": [False, False, False],
        "c": [True, True, True],
    }


@pytest.mark.parametrize("to", ["bf16", "fp8", ("fp8", "bf16"), ("mxfp8", "bf16")])
@pytest.mark.parametrize("unit", ["flops", "bytes"])
def test_single_gemms_within_the_budget_and_as_printed(to: Any, unit: str) -> None:
    budget = fp4.Budget(**{unit: 0.3})
    found = fp4.suggest(outliers(), batches(2), ALL, budget, to=to, loss=squares, seeds=1)
    assert 0.15 < found.spent <= 0.3
    policy = executed(found, policy=ALL)
    assert policy == found.policy
    sites = Sensitivity(outliers(), batches(1), squares, 1).sites()
    after, before = kept(policy, sites), kept(ALL, sites)
    chosen = {(c.linear, g): c.kept for c in found.candidates for g in c.gemms if c.kept}
    assert chosen
    for key, precision in after.items():
        expected = {"": before[key], "bf16": str(fp4.BF16)}
        expected |= {t: str(fp4.recipe(t).precision.gemms()[key[1]]) for t in ("fp8", "mxfp8")}
        assert precision == expected[chosen.get(key, "")] or key == ("a", "dgrad"), key
    elements = {"a": (32, 96, 64), "b": (32, 64, 96), "c": (32, 64, 64)}

    def cost(name: str, gemm: str) -> float:
        m, n, k = elements[name]
        if unit == "flops":
            return m * n * k
        return {"fprop": m * k + n * k, "dgrad": m * n + n * k, "wgrad": m * n + m * k}[gemm]

    whole = sum(cost(n, g) for n in "abc" for g in ("fprop", "dgrad", "wgrad") if (n, g) != ("a", "dgrad"))
    assert found.spent == pytest.approx(sum(cost(*key) * COSTS[t] for key, t in chosen.items()) / whole)


def test_a_recipes_name_drops_its_tail_and_keeps_its_heads() -> None:
    model = llama(num_hidden_layers=1)
    text = torch.randint(0, 256, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": t, "labels": t} for t in text]
    with torch.autocast("cpu", torch.bfloat16):
        found = fp4.suggest(model, data, "quartet2", budget=0.2, seeds=1)
    assert found.code.startswith('policy = fp4.recipe("quartet2", high_precision_tail=0.0).with_rules(\n')
    assert executed(found) == found.policy
    assert not any(c.linear == "lm_head" for c in found.candidates)
    assert {c.gemms for c in found.candidates} == {("fprop", "dgrad", "wgrad")}  # its backward reads forward's copies
    assert found.after.error < found.before.error
    json.loads(found.to_json())


def test_nothing_kept_is_the_policy_itself() -> None:
    found = fp4.suggest(MLP(), batches(1), "nvfp4", budget=0, loss=squares, seeds=1)
    assert found.code == 'policy = fp4.recipe("nvfp4", high_precision_tail=0.0)'
    assert executed(found) == found.policy == fp4.recipe("nvfp4", high_precision_tail=0.0)
    assert (found.spent, found.before) == (0, found.after)


def test_by_loss_chooses_among_fprops() -> None:
    found = fp4.suggest(outliers(), batches(2), ALL, budget=0.5, loss=squares, by="loss", seeds=1)
    backward = [c for c in found.candidates if c.gemms != ("fprop",)]
    assert all(c.effects["policy"].loss == 0 and not c.kept for c in backward)
    assert {c.gemms for c in found.candidates if c.kept} == {("fprop",)}


def test_a_linear_called_twice_is_one_candidate() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)).relu())

    found = fp4.suggest(Twice(), batches(2), ALL, budget=0.4, loss=squares, seeds=1, per="linear")
    assert {c.linear: round(c.cost, 3) for c in found.candidates} == {"a": 0.625, "b": 0.375}  # 5 and 3 of 8 GEMMs
    sites = Sensitivity(Twice(), batches(1), squares, 1).sites()
    assert [s.name for s in sites] == ["a", "b", "a"]
    precisions = kept(executed(found, policy=ALL), sites)
    assert precisions["b", "fprop"] == str(fp4.BF16) != precisions["a", "fprop"]


@pytest.mark.parametrize("name", ["a[0]", "a*", "layers.0?"])
def test_a_name_with_wildcards_in_it_matches_itself_alone(name: str) -> None:
    assert matches(name, _pattern(name))
    assert not any(matches(other, _pattern(name)) for other in ("a0", "ab", "layers.01"))


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_there_is(seed: int) -> None:
    """Against every combination of 6 candidates in three precisions."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> float:
        return float(torch.rand(1, generator=generator))

    items = []
    for i in range(6):
        whole = draw()
        effects = {"policy": Effect(0, whole, whole), "fp8": Effect(0, whole, whole * draw())}
        effects["fp8"] = Effect(0, effects["fp8"].bias, effects["fp8"].bias)
        items.append(Candidate(str(i), ("fprop",), draw() / 3, effects))
    options = ["", "fp8", "bf16"]

    def total(choice: tuple[str, ...]) -> tuple[float, float]:
        cost = sum(c.cost * COSTS[t] for c, t in zip(items, choice, strict=True) if t)
        return cost, sum(c.damage("gradient", t or "policy") for c, t in zip(items, choice, strict=True))

    best = min(damage for cost, damage in map(total, itertools.product(options, repeat=6)) if cost <= 0.4)
    spent = _choose(items, ("fp8", "bf16"), "gradient", 0.4)
    cost, damage = total(tuple(c.kept for c in items))
    assert spent == pytest.approx(cost)
    assert cost <= 0.4 + 1e-9
    assert damage == pytest.approx(best, rel=2e-3)


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: fp4.suggest(MLP(), batches(), ALL, 1.5, loss=squares), "one share from 0 to 1, such as fp4.Budget"),
    (lambda: fp4.Budget(), "one share"),
    (lambda: fp4.Budget(flops=0.1, bytes=0.1), "one share"),
    (lambda: fp4.suggest(MLP(), [], ALL, loss=squares), "no batch.*batches="),
    (lambda: fp4.suggest(MLP(), batches(), ALL, loss=squares, to="fp4"), "to='fp4': write one or more of 'bf16', 'fp8'"),
    (lambda: fp4.suggest(MLP(), batches(), ALL, loss=squares, to=()), "to=.*such as"),
    (lambda: fp4.suggest(MLP(), batches(), ALL, loss=squares, per="layer"), "write 'gemm' or 'linear'"),
    (lambda: fp4.suggest(MLP(), batches(), ALL, loss=squares, by="sqnr"), "write one of 'gradient', 'loss'"),
    (lambda: fp4.suggest(MLP(), batches(), ALL, loss=squares, seeds=0), "how many random draws"),
    (lambda: fp4.suggest(MLP(), batches(), "bf16", loss=squares), "quantizes no GEMM"),
    (lambda: fp4.suggest(MLP(), batches(), "quartet2", loss=squares, per="gemm"), "Write per='linear'"),
    (lambda: fp4.suggest(MLP().requires_grad_(False), batches(), ALL, loss=squares), "requires_grad_"),
    (lambda: fp4.suggest(MLP(), [torch.full((4, 64), math.nan)], ALL, loss=squares), "fp4.measure.*names where"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_refusals_say_what_to_write(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(fp4.StepError, match=message):
        call()
