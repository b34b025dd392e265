"""``fp4 roofline``: the predicted time of each linear of a model in BF16, FP8 and FP4 on a GPU."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fp4.measure_cli import SourceError, _fail, _load, _option, _show

MODEL, GPU, SHOWN = "The model", "The GPU", "What is shown"
NOTE = "A prediction from published peaks and measured shares of them, not a measurement."


def roofline(
    source: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face config.json or the folder of one, or a Python script that defines `model` and `batch`.",
            show_default=False,
        ),
    ],
    gpu: Annotated[str, _option(GPU, "h200, b200, b300 or rtx5090.")] = "b200",
    change: Annotated[
        list[str] | None, _option(GPU, "Change an input: NAME=VALUE, e.g. fp4_efficiency=0.7; may be repeated.", "--set")
    ] = None,
    recipe: Annotated[str, _option(MODEL, "What FP4 means; `fp4 recipes` lists them.")] = "nvfp4",
    exact: Annotated[
        bool,
        _option(MODEL, "--no-exact: on h200, MXFP4 and block-scaled FP8 in FP8, as options={'exact': False} does."),
    ] = True,
    batch: Annotated[int, _option(MODEL, "Sequences a step of a language model.")] = 8,
    seq: Annotated[int, _option(MODEL, "Tokens a sequence of a language model.")] = 2048,
    plot: Annotated[str | None, _option(SHOWN, "Write the times by linear there, PNG, SVG or PDF.", default="none")] = None,
    json: Annotated[bool, _option(SHOWN, "Print JSON.", "--json")] = False,
) -> None:
    """Predict what each linear costs in BF16, FP8 (MXFP8) and FP4 on a GPU, quantizing included, and which of them gain.

    Nothing is run: a model of any size takes seconds on a CPU. The inputs are printed and can be changed.
    """
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports them, and they log what concerns no one here
        logging.getLogger(name).setLevel(logging.ERROR)
    import fp4
    from fp4 import roofline as model_of

    try:
        inputs = model_of.gpu(gpu).changed(**_changes(change or []))
        model, arguments, named = _model(source, batch, seq)
        sites = model_of.linears(model, *arguments, **named)
        if not sites:
            raise SourceError(f"{source}: no nn.Linear was called, so there is nothing to predict")
        found = model_of.predict(sites, inputs, recipe, exact=exact)
        if plot is not None:
            draw(found, plot)
    except (SourceError, model_of.RooflineError, fp4.PolicyError, ImportError) as error:
        _fail(error)
    if json:
        print(jsonlib.dumps(found.to_dict(), indent=1))
        return
    _show(table(found))
    print("\n".join(summary(found)))


def _changes(texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise SourceError(f"--set {text}; write NAME=VALUE, e.g. bandwidth=7.7") from None
    return found


def _model(source: str, batch: int, seq: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model and the arguments of one step; a language model from its configuration alone, on the meta device."""
    import torch

    if source.endswith(".py"):
        model, batches, _ = _load(source, 1, 2, 1)
        given = batches[0]
        if isinstance(given, dict):
            return model, (), given
        return model, tuple(given) if isinstance(given, list | tuple) else (given,), {}
    path = Path(source)
    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".json"):
        raise SourceError(f"{source} is no script (*.py), no config.json and no folder with one")
    if batch < 1 or seq < 1:
        raise SourceError(f"--batch {batch}, --seq {seq}; write at least 1")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise SourceError('a language model needs transformers; install with: pip install "torch-fp4[train]"') from None
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise SourceError(f"{source} is no configuration of a causal language model: {error}") from None
    ids = torch.zeros((batch, seq), dtype=torch.int64, device="meta")
    # A whole mask: transformers would look at the values of any other.
    mask = torch.ones((batch, 1, seq, seq), dtype=torch.bool, device="meta")
    return model, (), {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def _layerless(name: str) -> str:
    """The name with every number a star: layers that are alike have one."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def groups(found: Any) -> dict[tuple[Any, ...], list[Any]]:
    """The linears by what makes them alike: name without numbers, sizes, times."""
    made: dict[tuple[Any, ...], list[Any]] = {}
    for x in found.linears:
        made.setdefault((_layerless(x.name), x.m, x.n, x.k, x.fp4), []).append(x)
    return made


def table(found: Any) -> Table:
    """A row a kind of linear: milliseconds of all of them together."""
    head = ("linear", "count", "M", "N", "K", "BF16 ms", "FP8 ms", f"{found.recipe} ms", "gain", "slower than BF16")
    made = Table(*head, box=None, title=f"{found.inputs.gpu}: predicted, not measured", title_justify="left")
    for column in made.columns[1:9]:
        column.justify = "right"
    for (name, m, n, k, _), alike in groups(found).items():
        one = alike[0]
        losing = [role for role, (recipe, plain) in one.gemms.items() if recipe > plain]
        cells = [name, len(alike), m, n, k, *(f"{1e3 * len(alike) * t:.3f}" for t in (one.bf16, one.fp8, one.fp4))]
        made.add_row(*(escape(str(c)) for c in cells), f"{one.bf16 / one.fp4:.2f}x", ", ".join(losing))
    return made


def summary(found: Any) -> list[str]:
    """The step, which linears gain, and the inputs."""
    plain = found.step("bf16")
    lines = [
        f"linears: BF16 {1e3 * found.total('bf16'):.2f} ms, FP8 {1e3 * found.total('fp8'):.2f} ms, "
        f"{found.recipe} {1e3 * found.total('fp4'):.2f} ms",
        f"step: FP8 {plain / found.step('fp8'):.2f} times as fast as BF16, "
        f"{found.recipe} {plain / found.step('fp4'):.2f} times",
        f"{sum(x.gains for x in found.linears)} of {len(found.linears)} linears gain",
    ]
    reasons = {how for x in found.linears for how in x.how.values() if how.startswith("emulated")}
    lines += sorted(reasons)
    inputs = found.inputs
    values = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name not in ("gpu", "assumed")}
    marked = (f"{n}={v}" + " (assumed)" * (n in inputs.assumed) for n, v in values.items())
    lines.append(f"inputs: {', '.join(marked)}")
    lines.append(NOTE + " Change one with --set NAME=VALUE.")
    return lines


def draw(found: Any, path: str) -> None:
    """Bars of each kind of linear's predicted time, layers that are alike once, in the order of execution."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SourceError('a plot needs matplotlib; install with: pip install "torch-fp4[plot]"') from None
    kinds = list(groups(found).items())
    figure = Figure(figsize=(9.0, 1.6 + 0.42 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    series = (("BF16", "bf16", "#7a7a7a"), ("FP8 (mxfp8)", "fp8", "#5b8fd6"), (found.recipe, "fp4", "#d1622b"))
    for i, (label, precision, color) in enumerate(series):
        values = [1e3 * getattr(alike[0], precision) for _, alike in kinds]
        axes.barh([j + (i - 1) * 0.28 for j in range(len(kinds))], values, 0.28, label=label, color=color)
    kept = [" in BF16" * (set(alike[0].how.values()) == {"BF16"}) for _, alike in kinds]
    labels = [f"{key[0]} ({key[2]} x {key[3]}), {len(alike)}{k}" for (key, alike), k in zip(kinds, kept, strict=True)]
    axes.set_yticks(range(len(kinds)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=0.5 * min(1e3 * min(x.bf16, x.fp8, x.fp4) for x in found.linears))
    axes.set_xlabel("ms of one linear a step, forward and backward")
    axes.set_title(f"{found.inputs.gpu}: predicted, not measured")
    axes.legend()
    figure.savefig(path, dpi=120)
