"""What ``fp4.suggest`` keeps against the last 15 % of the linears, at the same FLOPs: damage on the demo model.

    python -m benchmarks.suggest_policy [FOLDER]

Trains the model of `make demo` (2 layers of 128) in BF16 on Python's standard library, 800 steps, or takes the run that FOLDER
holds. From that checkpoint, under nvfp4 without its tail:

1. ranks every GEMM on 4 training batches (``fp4.suggest``);
2. makes policies that keep the FLOPs of the last 15 % of the linears in BF16, by several rankings, and a null control of three
   random choices;
3. measures each on 8 held-out batches: change of the loss, error of the gradient;
4. trains on for 150 steps under some of them, two seeds of the draws, over the same batches, and compares the held-out loss
   with that of training on in BF16.

Step 4 runs the rewritten graphs op by op. Writes results/suggest_policy.json, docs/plots/suggest.png, and the
error report's plots of the checkpoint, measure.png and measure_scales.png.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp4
from benchmarks.common import write
from benchmarks.findings.common import save
from fp4.compiler.explain.measure import measure_step
from fp4.compiler.explain.sensitivity import Effect, Sensitivity
from fp4.compiler.explain.step import Capture
from fp4.compiler.explain.suggest import Candidate, _choose, _rules
from fp4.compiler.policy import Policy
from fp4.train import Settings, checkpoint, data, run
from fp4.train.model import BETAS

BASE = fp4.recipe("nvfp4", high_precision_tail=0.0)
LAST = fp4.recipe("nvfp4")  # its tail is the last 15 %
STEPS, RATE, WARMUP, SEEDS = 150, 1e-3, 10, (0, 1)
RANKED, HELD_OUT = 4, 8
TRAINED = ("nothing kept", "last 15 %", "suggested by gradient", "suggested by loss", "random 0")


def settings(folder: str) -> Settings:
    """Those of `make demo`, BF16 alone."""
    return Settings.sized("tiny", recipes=("bf16",), steps=800, vocab=512, batch=4, seq=128, lr=4e-3, device="cpu", out=folder)


def load(folder: str) -> Any:
    from transformers import LlamaForCausalLM

    found = checkpoint.latest(Path(folder) / "bf16")
    return LlamaForCausalLM.from_pretrained(found, local_files_only=True)


def loss(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=batch[0], labels=batch[1], shift_labels=batch[1], use_cache=False).loss


def flops(policy: Policy, sites: list[Any], candidates: list[Candidate]) -> float:
    """Share of the candidates' FLOPs that the policy leaves in BF16."""
    decisions, _ = policy.assign(sites)
    precision = {s.name: d.precision.gemms() for s, d in zip(sites, decisions, strict=True)}
    return sum(c.cost for c in candidates if not precision[c.linear][c.gemms[0]].quantized)


def chosen(candidates: list[Candidate], damage: dict[tuple[str, str], float], budget: float, sites: list[Any]) -> Policy:
    """BASE with those candidates kept whose given damage is largest within the budget."""
    copies = [copy.copy(c) for c in candidates]
    for c in copies:
        value = damage[c.linear, c.gemms[0]]
        c.effects, c.kept = {"policy": Effect(value, value, value)}, ""
    _choose(copies, ("bf16",), "gradient", budget)
    decisions, _ = BASE.assign(sites)
    rules, _ = _rules(copies, {s.name: d.precision for s, d in zip(sites, decisions, strict=True)})
    return BASE.with_rules(*rules)


def policies(model: Any, batches: list[Any]) -> tuple[dict[str, Policy], fp4.Suggestion, dict[str, float]]:
    """The policies by name, the suggestion by gradient, and the share of FLOPs each keeps in BF16."""
    sites = Sensitivity(model, batches[:1], loss, 1).sites()
    size = {s.name: (s.m or 0) * (s.n or 0) * (s.k or 0) for s in sites if s.name != "lm_head"}  # the recipe keeps the head
    tail = {s.name for s, d in zip(sites, LAST.assign(sites)[0], strict=True) if not d.precision.quantized}
    budget = sum(n for name, n in size.items() if name in tail) / sum(size.values())
    suggestion = fp4.suggest(model, batches, "nvfp4", budget, loss=loss)
    candidates = suggestion.candidates
    by_linear = fp4.suggest(model, batches, "nvfp4", budget, loss=loss, per="linear")
    gradient = {(c.linear, c.gemms[0]): c.damage("gradient") for c in candidates}
    by_loss = {(c.linear, c.gemms[0]): c.damage("loss") for c in candidates}
    one_step = {(c.linear, c.gemms[0]): c.effects["policy"].error for c in candidates}
    measured = measure_step(Capture(model, loss)(batches[0]), BASE)
    local = {(g.linear, g.role): g.relative_error**2 for g in measured.gemms}
    found = {"nothing kept": BASE, "last 15 %": LAST}
    found["suggested by gradient"] = suggestion.policy
    assert chosen(candidates, gradient, budget, sites).rules == suggestion.policy.rules
    found["suggested by linear"] = by_linear.policy
    found["suggested by loss"] = chosen(candidates, by_loss, budget, sites)
    found["by one step's error"] = chosen(candidates, one_step, budget, sites)
    found["by local error"] = chosen(candidates, local, budget, sites)
    for seed in range(3):
        draw = random.Random(seed)
        found[f"random {seed}"] = chosen(candidates, {k: c * draw.random() for k, c in _costs(candidates)}, budget, sites)
    return found, suggestion, {name: flops(p, sites, candidates) for name, p in found.items()}


def pictures(model: Any, batch: Any) -> None:
    """The error report's plots, of the checkpoint under nvfp4: docs/plots/measure.png and measure_scales.png."""
    step = Capture(model, loss)(batch)
    measured = measure_step(step, LAST)
    save(measured.plot(), "measure")
    save(measured.plot_scales(only="model.layers.1.self_attn.*"), "measure_scales")


def totals(candidates: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Sums of the effects of the GEMMs quantized alone, by role: does the whole measure what its parts add up to?"""
    found: dict[str, dict[str, float]] = {}
    for c in candidates:
        into = found.setdefault(c["gemms"][0], dict.fromkeys(("loss", "error", "bias"), 0.0))
        for key in into:
            into[key] += c["effects"]["policy"][key]
    return found


def _costs(candidates: list[Candidate]) -> Iterator[tuple[tuple[str, str], float]]:
    return (((c.linear, c.gemms[0]), c.cost) for c in sorted(candidates, key=lambda c: (c.linear, c.gemms)))


def train_on(folder: str, policy: Policy, training: data.Batches, held: list[Any], seed: int) -> dict[str, Any]:
    """Losses of `STEPS` further steps under a policy, and the held-out loss after them, under it and in BF16."""
    model = load(folder)
    capture = Capture(model, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.1)
    names = dict(model.named_parameters())
    captured = capture(held[0]).captured
    graph, _ = captured.rewritten(policy)
    plain, _ = captured.rewritten(Policy("bf16"))
    losses = []
    for step in range(STEPS):
        outcome = capture(training.training(800 + step)).run(graph, draw=1 + seed * STEPS + step)
        losses.append(float(outcome.loss))
        for name, gradient in outcome.gradients.items():
            names[name].grad = gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
    after = {
        key: sum(float(capture(b).run(g, draw=10**6 + i).loss) for i, b in enumerate(held)) / len(held)
        for key, g in (("held-out loss", graph), ("held-out loss in BF16", plain))
    }
    return {"losses": losses, **after}


def draw(figures: dict[str, Any]) -> None:
    """Damage of each policy: loss and gradient at the checkpoint, held-out loss after training on."""
    from matplotlib.figure import Figure

    names = list(figures["policies"])
    figure = Figure(figsize=(12, 4.2), layout="constrained", dpi=120)
    panels = figure.subplots(1, 3, sharey=True)
    rows = range(len(names))
    held = [figures["policies"][n]["held-out"] for n in names]
    panels[0].barh(rows, [h["loss"] for h in held])
    panels[0].set(title="change of the held-out loss, nats", yticks=rows, yticklabels=names)
    panels[1].barh(rows, [h["error"] for h in held], label="one step's")
    panels[1].barh(rows, [max(h["bias"], 0) for h in held], label="persistent", height=0.4)
    panels[1].set(title="squared error of the gradient")
    panels[1].legend(loc="lower right")
    base = {s: figures["training"]["bf16"][s]["held-out loss"] for s in figures["training"]["bf16"]}
    for row, name in enumerate(names):
        for seed, found in figures["training"].get(name, {}).items():
            marks = ((found["held-out loss"], "o", "C0"), (found["held-out loss in BF16"], "x", "C1"))
            for value, mark, colour in marks:
                panels[2].plot(value - base[seed], row, mark, color=colour)
    panels[2].plot([], [], "oC0", label="under the policy")
    panels[2].plot([], [], "xC1", label="its weights in BF16")
    panels[2].set(title=f"held-out loss less BF16's, {STEPS} steps on")
    panels[2].legend(loc="lower right")
    for panel in panels:
        panel.invert_yaxis() if panel is panels[0] else None
        panel.axvline(0, color="black", linewidth=0.8)
        panel.grid(alpha=0.3, axis="x")
    save(figure, "suggest")


def main(folder: str) -> None:
    torch.set_num_threads(1)
    if not (Path(folder) / "run.json").exists():
        run(settings(folder))
    asked = settings(folder)
    corpus = data.prepare(asked.data, asked.vocab, Path(folder) / "data", reuse=True)
    training = data.Batches("training", corpus.train, asked.batch, asked.seq, asked.seed)
    held = list(data.Batches("held-out", corpus.held_out, asked.batch, asked.seq, asked.seed).evaluation(HELD_OUT))
    model = load(folder)
    pictures(model, training.training(800))
    began = time.perf_counter()
    found, suggestion, shares = policies(model, [training.training(800 + i) for i in range(RANKED)])
    print(f"ranked in {time.perf_counter() - began:.0f} s", suggestion.code, sep="\n", flush=True)
    damage = Sensitivity(model, held, loss, 2)
    entries: dict[str, Any] = {}
    for name, policy in found.items():
        entries[name] = {"share kept": shares[name], "held-out": asdict(damage.effect(policy))}
        print(name, entries[name], flush=True)
    figures: dict[str, Any] = {
        "setting": __doc__,
        "tokens": f"4 x 128 a batch; ranked on {RANKED} training batches, measured on {HELD_OUT} held-out batches",
        "suggestion": suggestion.to_dict(),
        "alone, summed": totals(suggestion.to_dict()["candidates"]),
        "policies": entries,
        "training": {},
    }
    for seed in SEEDS:
        for name in ("bf16", *TRAINED):
            result = train_on(folder, found.get(name, Policy("bf16")), training, held, seed)
            figures["training"].setdefault(name, {})[str(seed)] = result
            print(name, seed, {k: v for k, v in result.items() if k != "losses"}, flush=True)
        write("suggest_policy", figures)  # a seed at a time: each takes many minutes
        draw(figures)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
