"""The command line: ``fp4 train``, ``fp4 recipes``, ``fp4 kernels``, ``fp4 measure``, ``fp4 suggest``,
``fp4 explain``."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from datetime import datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp4.explain_cli import explain
from fp4.kernels_cli import kernels
from fp4.measure_cli import measure, suggest
from fp4.roofline_cli import roofline

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
MODEL, TEXT, TRAINING, RUN = "The model", "The text", "Training", "The run"
SIZES_HELP = "tiny (2 layers of 128), small (4 of 256), medium (6 of 640) or large (12 of 768)"
WITH_RESUME = {"resume", "out", "report"}

app.command()(explain)
app.command()(kernels)
app.command()(measure)
app.command()(suggest)
app.command()(roofline)


def main() -> None:
    """Entry point of the `fp4` command."""
    app()


def _version(value: bool) -> None:
    if value:
        print(importlib.metadata.version("torch-fp4"))
        raise typer.Exit


@app.callback()
def _fp4(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")] = False,
) -> None:
    """Training in 4-bit floating point: torch.compile(model, backend="fp4")."""


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one: its quantizers, flags, phases, and citation.")] = None,
) -> None:
    """List the recipes: what --recipes, and options={"recipe": ...} of the backend, can name."""
    import fp4
    from fp4.passes.recipes import describe

    console = Console()
    if name is not None:
        try:
            about = describe(name)
        except fp4.PolicyError as error:
            _fail(error)
        console.print(about.text, markup=False, highlight=False, soft_wrap=True)
        console.print()
        console.print(_precisions(name, about.policy))
        for phase, policy in about.policy.phases:
            console.print(_precisions(f"phase {phase}", policy))
        flags = Table("flag", "default", box=None, title="fp4.recipe(NAME, flag=value)", title_justify="left")
        for flag, default in about.flags.items():
            flags.add_row(flag, escape(repr(default)))
        console.print(flags)
        return
    table = Table("recipe", "what it does", box=None)
    for known, line in fp4.recipes().items():
        table.add_row(known, line)
    console.print(table)


def _precisions(title: str, policy: Any) -> Table:
    """The six operands of a linear under the policy, and what its rules keep."""
    rules = ", ".join(rule.text for rule in policy.rules)
    table = Table("GEMM", "first operand", "second operand", "rotation", title=title, title_justify="left")
    table.caption, table.caption_justify = (f"in high precision: {rules}" if rules else None), "left"
    for (gemm, precision), letters in zip(
        policy.precision.gemms().items(), (("X", "W"), ("dY", "W"), ("dY", "X")), strict=True
    ):
        operands = (f"{letter} {operand}" for letter, operand in zip(letters, (precision.first, precision.second), strict=True))
        result = " to FP32" if precision.output else ""
        table.add_row(gemm + result, *(escape(o) for o in operands), escape(str(precision.rotation or "")))
    return table


def _fail(error: Exception) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(2) from None


def _option(panel: str, text: str, *flags: str, default: bool | str = True) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=default)


@app.command()
def train(
    context: typer.Context,
    recipes: Annotated[str, _option(TRAINING, "Names separated by commas: a model each, over the same data.")] = "bf16,nvfp4",
    steps: Annotated[int, _option(TRAINING, "Optimizer steps.")] = 300,
    batch: Annotated[int, _option(TRAINING, "Sequences a step.")] = 8,
    seq: Annotated[int, _option(TRAINING, "Tokens a sequence.")] = 256,
    lr: Annotated[float, _option(TRAINING, "Peak rate of AdamW (betas .9, .95); a cosine to a tenth of it follows.")] = 2e-3,
    warmup: Annotated[int | None, _option(TRAINING, "Steps of linear warm-up.", default="steps / 10")] = None,
    weight_decay: Annotated[float, _option(TRAINING, "On the matrices; norms have none.")] = 0.1,
    clip: Annotated[float, _option(TRAINING, "Largest global gradient norm; 0: no limit.")] = 1.0,
    schedule: Annotated[
        str, _option(TRAINING, "Switches of phase, RECIPE:PHASE@WHEN, by commas; WHEN: a step, a fraction, or sqrt3.")
    ] = "",
    rewarm: Annotated[int, _option(TRAINING, "Steps of linear warm-up after a switch of phase.")] = 0,
    noise_every: Annotated[int, _option(TRAINING, "Steps between measurements of a scheduled recipe's gradient noise.")] = 0,
    dtype: Annotated[str, _option(TRAINING, "bf16: FP32 parameters, autocast to BF16. fp32: no autocast.")] = "bf16",
    seed: Annotated[int, _option(TRAINING, "Of the weights, the order of the data and the random rounding.")] = 0,
    size: Annotated[str, _option(MODEL, f"{SIZES_HELP}; the flags below change single values of it.")] = "tiny",
    layers: Annotated[int | None, _option(MODEL, "Decoder layers.", default="by size")] = None,
    hidden: Annotated[int | None, _option(MODEL, "Width.", default="by size")] = None,
    intermediate: Annotated[int | None, _option(MODEL, "Width of the MLP.", default="8/3 of hidden, a multiple of 64")] = None,
    heads: Annotated[int | None, _option(MODEL, "Attention heads.", default="by size")] = None,
    kv_heads: Annotated[int | None, _option(MODEL, "Heads of keys and values.", default="by size")] = None,
    vocab: Annotated[int | None, _option(MODEL, "Entries of the byte-level BPE.", default="by size")] = None,
    data: Annotated[
        list[str] | None,
        _option(TEXT, "File or folder to train on; may be repeated. 1/20 is held out.", default="Python's standard library"),
    ] = None,
    out: Annotated[str | None, _option(RUN, "Folder for run.json, loss.png and checkpoints.", default="runs/DATE-TIME")] = None,
    resume: Annotated[bool, _option(RUN, "Go on with the run in --out as if it had never stopped.", "--resume")] = False,
    eval_every: Annotated[int, _option(RUN, "Steps between evaluations on held-out text; 0: at the end only.")] = 0,
    eval_batches: Annotated[int, _option(RUN, "Batches of an evaluation, at most.")] = 8,
    checkpoint_every: Annotated[int, _option(RUN, "Steps between checkpoints; 0: at the end only.")] = 0,
    device: Annotated[str, _option(RUN, "auto (a GPU if there is one), cpu or cuda.")] = "auto",
    mode: Annotated[str, _option(RUN, "Mode of torch.compile, e.g. max-autotune.")] = "default",
    options: Annotated[str, _option(RUN, "More options of the fp4 backend, as a JSON object.", "--backend-options")] = "{}",
    report: Annotated[bool, _option(RUN, "Print the coverage report of each recipe.", "--report")] = False,
) -> None:
    """Pre-train a Llama on text, once per recipe, and compare the losses.

    With no argument: a small model on the source of Python's standard library, in BF16 and in NVFP4, in minutes on a CPU.
    Ctrl-C saves a checkpoint; `fp4 train --out FOLDER --resume` goes on from it.
    """
    console = Console()
    _quiet()
    from torch._dynamo.exc import BackendCompilerFailed

    from fp4.compiler.backend import OptionError
    from fp4.compiler.joint_pass import StrictError
    from fp4.compiler.policy import PolicyError
    from fp4.compiler.supported import UnsupportedError
    from fp4.train import Settings, TrainError, run

    try:
        if resume:
            settings = _resumed(context, out)
        else:
            given: dict[str, Any] = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "heads": heads}
            given |= {"kv_heads": kv_heads, "vocab": vocab, "warmup": warmup}
            settings = Settings.sized(
                size,
                **{name: value for name, value in given.items() if value is not None},
                recipes=_names(recipes),
                data=data or [],
                schedule=_names(schedule),
                rewarm=rewarm,
                noise_every=noise_every,
                steps=steps,
                batch=batch,
                seq=seq,
                lr=lr,
                weight_decay=weight_decay,
                clip=clip,
                dtype=dtype,
                seed=seed,
                device=device,
                mode=mode,
                options=_json(options),
                eval_every=eval_every,
                eval_batches=eval_batches,
                checkpoint_every=checkpoint_every,
                out=out or f"runs/{datetime.now():%Y%m%d-%H%M%S}",
            )
        results = run(settings, resume=resume, console=console, show_report=report)
    except (TrainError, OptionError, PolicyError, StrictError, UnsupportedError) as error:
        _fail(error)
    except BackendCompilerFailed as error:  # Dynamo wraps what a backend raises
        inner = error.inner_exception
        if not isinstance(inner, OptionError | PolicyError | StrictError | UnsupportedError):
            raise
        _fail(inner)
    if results["status"] == "interrupted":
        go_on = f"fp4 train --out {settings.out} --resume"
        console.print(f"stopped; what was done is saved. To go on: {go_on}", markup=False, soft_wrap=True)
        raise typer.Exit(130)
    console.print(_table(results))
    console.print(f"{settings.out}/run.json, {settings.out}/loss.png", markup=False, highlight=False, soft_wrap=True)


def _quiet() -> None:
    """transformers imports torchao where it is installed, and both log what concerns neither fp4 nor its user."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _json(text: str) -> dict[str, Any]:
    from fp4.train import TrainError

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TrainError(f"--backend-options {text!r} is not JSON ({error}); write e.g. '{{\"strict\": true}}'") from None
    if not isinstance(value, dict):
        raise TrainError(f"--backend-options {text!r} is not a JSON object; write e.g. '{{\"strict\": true}}'")
    return value


def _resumed(context: typer.Context, out: str | None) -> Any:
    from fp4.train import Settings, TrainError

    if out is None:
        raise TrainError("--resume goes on with a run, and nothing says which; write --out FOLDER")

    def source(parameter: Any) -> str:
        return getattr(context.get_parameter_source(parameter.name), "name", "")

    given = [p for p in context.command.params if source(p) == "COMMANDLINE"]
    if others := [p.opts[0] for p in given if p.name not in WITH_RESUME]:
        raise TrainError(f"--resume takes the settings from {out}/run.json; leave out {', '.join(others)}, or start a new run")
    return Settings.load(out)


def _table(results: dict[str, Any]) -> Table:
    table = Table("recipe", "train loss", "held-out loss", "gap to bf16, train", "gap, held-out", "tokens/s", "compile s")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, entry in results["recipes"].items():
        gap = entry["gap_to_bf16"]
        table.add_row(
            name,
            f"{entry['train_loss']:.4f}",
            f"{entry['eval_loss']:.4f}",
            f"{gap['train']:+.4f}" if gap else "",
            f"{gap['eval']:+.4f}" if gap else "",
            f"{entry['tokens_per_second']:,.0f}",
            f"{entry['compile_seconds']:.0f}",
        )
    return table
