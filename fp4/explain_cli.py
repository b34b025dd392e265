"""``fp4 explain``: what the compiler makes of a model, from a script or a Hugging Face configuration. Nothing is run."""

from __future__ import annotations

import json
import logging
import runpy
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

MODEL, POLICY, SHOWN = "The model", "The policy", "What is shown"
SOURCE_HELP = (
    "A Python script with `model` and `inputs` (values, or functions that return them; inputs: a tuple, or a dict of named "
    "ones), or a Hugging Face causal language model: a folder or config.json, a model type such as llama, or a name."
)


class SourceError(ValueError):
    """A model that cannot be built as named; the message says what to write instead."""


def _fail(error: object) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _option(panel: str, text: str, *flags: str, default: bool | str = True) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=default)


def explain(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP, show_default=False)],
    recipe: Annotated[str, _option(POLICY, "A recipe's name; `fp4 recipes` lists them.")] = "nvfp4",
    phase: Annotated[str | None, _option(POLICY, "A phase of the recipe.", default="none")] = None,
    target: Annotated[str, _option(POLICY, "cpu, or the GPU architecture to lower for: sm_90, sm_100a, ...")] = "cpu",
    library: Annotated[bool, _option(POLICY, "Block-scaled products by cuBLAS.", "--library")] = False,
    exact: Annotated[bool, _option(POLICY, "--no-exact: MXFP4 and block-scaled FP8 in FP8 on sm_89 and sm_90.")] = True,
    native_draws: Annotated[
        bool, _option(POLICY, "Stochastic rounding by the GPU's own instruction (sm_100a, sm_103a).", "--native-draws")
    ] = False,
    batch: Annotated[int, _option(MODEL, "Sequences of a language model.")] = 4,
    seq: Annotated[int, _option(MODEL, "Tokens a sequence of a language model.")] = 1024,
    dtype: Annotated[str, _option(MODEL, "bf16: autocast to BF16. fp32: none.")] = "bf16",
    inference: Annotated[bool, _option(MODEL, "Without gradients: the inference graph.", "--inference")] = False,
    settings: Annotated[
        list[str] | None,
        _option(MODEL, "Change the configuration: num_hidden_layers=2; may be repeated.", "--set", default="none"),
    ] = None,
    all_layers: Annotated[bool, _option(SHOWN, "A row for every layer; else those that are alike once.", "--all")] = False,
    markdown: Annotated[bool, _option(SHOWN, "The table as Markdown.", "--markdown")] = False,
    as_json: Annotated[bool, _option(SHOWN, "The table as JSON.", "--json")] = False,
    stage: Annotated[
        str | None, _option(SHOWN, "Code of a stage: captured, tagged, rewritten, lowered ...", default="none")
    ] = None,
    diff: Annotated[str | None, _option(SHOWN, "Diff of two stages, e.g. tagged,rewritten.", default="none")] = None,
    mlir: Annotated[str | None, _option(SHOWN, "MLIR of a stage.", default="none")] = None,
    linear: Annotated[
        str | None, _option(SHOWN, "One linear at every level, FX to MLIR; with a GPU target to SASS.", default="none")
    ] = None,
    draw: Annotated[str | None, _option(SHOWN, "Write a drawing there: .svg or .png.", default="none")] = None,
    layer: Annotated[str | None, _option(SHOWN, "Draw one module only, e.g. model.layers.0.", default="none")] = None,
    html: Annotated[str | None, _option(SHOWN, "Write one page with all of it there.", default="none")] = None,
) -> None:
    """Show what the compiler makes of a model's forward and backward: no training step, no GPU, no weights.

    Without an option: the table of every linear, its GEMMs, their operands, what is saved for backward.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch

    import fp4

    try:
        if dtype not in ("bf16", "fp32"):
            raise SourceError(f"--dtype {dtype!r}; write bf16 or fp32")
        model, args, named = _load(source, batch, seq, settings or [])
        autocast = torch.bfloat16 if dtype == "bf16" else None
        with torch.set_grad_enabled(not inference):
            lowering: dict[str, Any] = {"target": target, "library": library, "exact": exact, "native_draws": native_draws}
            found = fp4.explain(model, *args, recipe=recipe, phase=phase, autocast=autocast, **lowering, **named)
        written = [p for p in (draw, html) if p is not None]
        if draw is not None:
            found.draw(draw, layer=layer, collapse=not all_layers)
        if html is not None:
            found.html(html)
        texts = [found.fx(stage)] if stage is not None else []
        texts += [found.diff(*_two(diff))] if diff is not None else []
        texts += [found.mlir(mlir)] if mlir is not None else []
        texts += [str(found.levels(linear))] if linear is not None else []
        table = found.table(collapse=not all_layers)
        if markdown or as_json:
            texts.append(table.to_markdown() if markdown else table.to_json())
    except (SourceError, fp4.ExplainError, fp4.PolicyError, ValueError, ImportError) as error:
        _fail(error)
    for text in texts:
        print(text)
    if not texts and not written:
        table.show()
    for path in written:
        print(path)


def _two(text: str) -> tuple[str, str]:
    first, _, second = text.partition(",")
    if not second:
        raise SourceError(f"--diff {text!r}: write two stages, e.g. tagged,rewritten")
    return first.strip(), second.strip()


def _load(source: str, batch: int, seq: int, settings: list[str]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments, positional and named."""
    if source.endswith(".py"):
        return _script(source)
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise SourceError("a Hugging Face model needs transformers; write: pip install 'transformers>=5'") from error
    changed = dict(_setting(text) for text in settings)
    try:
        if source in CONFIG_MAPPING and not Path(source).exists():
            config = AutoConfig.for_model(source, **changed)
        else:
            config = AutoConfig.from_pretrained(source, **changed)
        config.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(
            f"{source!r} is no script and no model that can be configured ({str(error).splitlines()[0]}). Write a .py file, "
            "a folder with a config.json, or a model type such as llama"
        ) from error
    tokens = torch.empty((batch, seq), dtype=torch.int64, device="meta")
    return model, (), {"input_ids": tokens, "labels": tokens}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not value:
        raise SourceError(f"--set {text!r}: write NAME=VALUE, e.g. num_hidden_layers=2")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _script(path: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not Path(path).is_file():
        raise SourceError(f"there is no file {path}")
    names = runpy.run_path(path)
    if missing := [n for n in ("model", "inputs") if n not in names]:
        raise SourceError(f"{path} defines no {' and no '.join(missing)}; write `model` and `inputs`, values or functions")
    import torch

    model, inputs = names["model"], names["inputs"]
    if not isinstance(model, torch.nn.Module):
        model = model()
    if callable(inputs):
        inputs = inputs()
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
