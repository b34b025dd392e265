"""``fp4 measure`` and ``fp4 suggest``: the error report of a model's training step, and the policy it leads to."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

MODEL, STEP, SHOWN, CHOICE = "The model", "The step", "What is shown", "What is kept"
SOURCE_HELP = (
    "A Python script that defines `model` and `batch` (or `batches`; and `loss`, if the model returns none), or a Hugging "
    "Face causal language model: a folder or a name. A checkpoint of `fp4 train` is measured on its run's text."
)


class SourceError(ValueError):
    """A model that cannot be loaded as named; the message says what to write instead."""


def _fail(error: object, code: int = 2) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _option(panel: str, text: str, *flags: str, default: bool | str = True) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=default)


Source = Annotated[str, typer.Argument(help=SOURCE_HELP, show_default=False)]
Recipe = Annotated[str, _option(STEP, "A recipe's name; `fp4 recipes` lists them.")]
Phase = Annotated[str | None, _option(STEP, "A phase of the recipe.", default="none")]
BatchSize = Annotated[int, _option(STEP, "Sequences a batch of a language model.")]
SeqLength = Annotated[int, _option(STEP, "Tokens a sequence of a language model.")]
Dtype = Annotated[str, _option(STEP, "bf16: autocast to BF16. fp32: none.")]


def measure(
    source: Source,
    recipe: Recipe = "nvfp4",
    phase: Phase = None,
    batch: BatchSize = 4,
    seq: SeqLength = 128,
    dtype: Dtype = "bf16",
    seed: Annotated[int, _option(STEP, "Of the random draws.")] = 0,
    plot: Annotated[str | None, _option(SHOWN, "Write the heat map there, PNG, SVG or PDF.", default="none")] = None,
    scales: Annotated[str | None, _option(SHOWN, "Write the histograms of the block scales there.", default="none")] = None,
    json: Annotated[bool, _option(SHOWN, "Print JSON.", "--json")] = False,
    markdown: Annotated[bool, _option(SHOWN, "Print a Markdown table.", "--markdown")] = False,
) -> None:
    """Run one training step under a recipe and measure every operand and product of every linear's three GEMMs.

    Exits with 1 where there is a NaN or Inf; the first is named.
    """
    import fp4

    try:
        model, batches, loss = _load(source, batch, seq, 1)
        with _autocast(dtype):
            found = fp4.measure(model, batches[0], recipe, loss=loss, phase=phase, seed=seed)
        for path, figure in ((plot, found.plot), (scales, found.plot_scales)):
            if path is not None:
                figure(path)
    except (SourceError, fp4.StepError, fp4.PolicyError, ImportError) as error:
        _fail(error)
    _show(found.to_json() if json else found.to_markdown() if markdown else found.table())
    if found.nonfinite:
        _fail(f"NaN or Inf first in {found.nonfinite[0]}", code=1)


def suggest(
    source: Source,
    recipe: Recipe = "nvfp4",
    phase: Phase = None,
    batch: BatchSize = 4,
    seq: SeqLength = 128,
    dtype: Dtype = "bf16",
    batches: Annotated[int, _option(STEP, "Batches of a language model to measure on.")] = 4,
    seeds: Annotated[int, _option(STEP, "Draws of a random recipe, a batch.")] = 2,
    budget: Annotated[float, _option(CHOICE, "Share of the linears' FLOPs to keep in higher precision, 0 to 1.")] = 0.1,
    to: Annotated[str, _option(CHOICE, "bf16, fp8 or mxfp8; several by commas: each is kept in what serves it best.")] = "bf16",
    per: Annotated[str | None, _option(CHOICE, "gemm or linear.", default="gemm where the recipe allows it")] = None,
    by: Annotated[str, _option(CHOICE, "gradient or loss: whose change ranks.")] = "gradient",
    table: Annotated[bool, _option(SHOWN, "Print what each GEMM does to loss and gradient, too.", "--table")] = False,
    json: Annotated[bool, _option(SHOWN, "Print JSON.", "--json")] = False,
) -> None:
    """Propose what to keep in higher precision, by its measured effect on this model, as code to paste."""
    import fp4

    try:
        model, given, loss = _load(source, batch, seq, batches)
        choices = [t.strip() for t in to.split(",") if t.strip()]
        with _autocast(dtype):
            found = fp4.suggest(model, given, recipe, budget, to=choices, per=per, by=by, loss=loss, phase=phase, seeds=seeds)
    except (SourceError, fp4.StepError, fp4.PolicyError, ImportError) as error:
        _fail(error)
    if json:
        _show(found.to_json())
        return
    if table:
        _show(found.table())
    _show(f"# {found.title()}\n{found.code}")


def _show(what: Any) -> None:
    if isinstance(what, str):
        print(what.rstrip("\n"))
        return
    console = Console()
    if console.is_terminal:
        console.print(what)
        return
    what.box = None  # plain, and a pipe has no width to fit a table into
    wide = Console(width=1000)
    with wide.capture() as capture:
        wide.print(what)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _autocast(dtype: str) -> Any:
    import torch

    if dtype not in ("bf16", "fp32"):
        raise SourceError(f"--dtype {dtype}; write bf16 or fp32")
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")


def _load(source: str, batch: int, seq: int, count: int) -> tuple[Any, list[Any], Any]:
    """(model, batches, loss) of a script, or a language model with batches of `batch` x `seq` tokens."""
    if batch < 1 or seq < 2 or count < 1:
        raise SourceError(f"--batch {batch}, --seq {seq}, {count} batches; write at least 1, 2 and 1")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise SourceError(f"there is no script {source}; write the path of one that defines `model` and `batch`")
        names = runpy.run_path(source)
        if "model" not in names or not {"batch", "batches"} & names.keys():
            raise SourceError(f"{source} defines no global `model`, or neither `batch` nor `batches`: write them there")
        return names["model"], list(names["batches"]) if "batches" in names else [names["batch"]], names.get("loss")
    return _language_model(source, batch, seq, count)


def _language_model(source: str, batch: int, seq: int, count: int) -> tuple[Any, list[Any], Any]:
    import numpy as np
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise SourceError('a language model needs transformers; install with: pip install "torch-fp4[train]"') from None
    folder = Path(source)
    try:
        if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))  # a config alone: random weights
        else:
            model = AutoModelForCausalLM.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{source} is no script (*.py), no folder of a Hugging Face causal language model and no name of one: {error}"
        ) from None
    model.config.use_cache = False
    text = folder.resolve().parent.parent / "data" / "train.npy"  # fp4 train: OUT/RECIPE/step-N beside OUT/data
    if text.is_file():
        tokens = torch.from_numpy(np.load(text).astype(np.int64))
    else:
        tokens = torch.randint(0, model.config.vocab_size, (count * batch * seq,), generator=torch.Generator().manual_seed(0))
    if len(tokens) < count * batch * seq:
        raise SourceError(
            f"{text} has {len(tokens)} tokens, {count} batches of {batch} x {seq} need more: write a smaller --seq"
        )
    batches = tokens[: count * batch * seq].reshape(count, batch, seq)
    return model.train(), [{"input_ids": b, "labels": b, "use_cache": False} for b in batches], None
