"""The training loop: one model a recipe, from the same weights, over the same batches."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import fp4
from fp4.compiler.backend import Options
from fp4.train import checkpoint, data, model, plot, results
from fp4.train.schedule import CRITICAL_RATIO, Switch
from fp4.train.settings import Settings, TrainError, require_extra


class Stop:
    """Ctrl-C as a request: the step at hand is finished, so that what is saved is whole. A second Ctrl-C stops at once."""

    requested = False

    def __call__(self, *_: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[Stop]:
        """Handles SIGINT within the block; elsewhere than in the main thread Python has no signals, and nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Within the block equal steps give equal bits: the embedding's gradient is otherwise a race of atomic additions."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses deterministic mode without it
    debug: Any = torch.utils.deterministic
    was, fill = torch.are_deterministic_algorithms_enabled(), debug.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    debug.fill_uninitialized_memory = False  # it writes every new buffer once more
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        debug.fill_uninitialized_memory = fill


@dataclass
class Trainer:
    """One recipe's model, from its initial weights or its last checkpoint."""

    recipe: str
    settings: Settings
    device: torch.device
    folder: Path

    def __post_init__(self) -> None:
        torch.compiler.reset()  # every recipe compiles the same forward: without this they'd share Dynamo's recompile limit
        self.model = model.build(self.settings).to(self.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = model.optimizer(self.model, self.settings)
        self.compiled, self.loss = model.compile_loss(self.model, self.recipe, self.settings, self.device)
        self.curves = checkpoint.Curves()
        self.coverage: dict[str, Any] = {}
        self.report: Any = None

    @property
    def done(self) -> int:
        return len(self.curves.losses)

    def start(self, batch: tuple[Tensor, Tensor], resume: bool) -> None:
        """Compiles, then takes up the state: with `resume` that of the last checkpoint if there is one, else the beginning.

        One forward and backward is thrown away for it. So what a compilation draws or measures is in no step, and an
        option that cannot be met (strict) is an error before the first one.
        """
        saved = checkpoint.latest(self.folder) if resume else None
        state = None
        if saved is not None:
            self.curves, state = checkpoint.load(saved, self.model, self.optimizer, self.device)
            if self.phase is not None:
                fp4.switch(self.compiled, self.phase)
        self.curves.compile_seconds = self._compile(batch)
        self.report = fp4.report(self.compiled)
        self.coverage = self.report.to_dict()
        torch.manual_seed(self.settings.seed)
        if state is not None:
            checkpoint.set_rng_state(state, self.device)

    @property
    def phase(self) -> str | None:
        """The phase of the recipe that trains now; None for the recipe itself."""
        return self.curves.phases[-1][1] if self.curves.phases else None

    def due(self) -> Switch | None:
        """The scheduled switch whose time has come."""
        passed = {phase for _, phase in self.curves.phases}
        ratio = self.curves.noise[-1][3] if self.curves.noise else math.inf
        for switch in self.settings.switches(self.recipe):
            by_noise = switch.step is None and ratio < CRITICAL_RATIO
            if switch.phase not in passed and (by_noise or (switch.step is not None and switch.step <= self.done)):
                return switch
        return None

    def switch(self, phase: str, batch: tuple[Tensor, Tensor]) -> None:
        """Trains in a phase of the recipe from here on; compiles it now, outside of any step's time."""
        fp4.switch(self.compiled, phase)
        state = checkpoint.rng_state(self.device)
        self.curves.compile_seconds += self._compile(batch)
        checkpoint.set_rng_state(state, self.device)
        self.curves.phases.append((self.done, phase))

    def measure_noise(self, phase: str, batch: tuple[Tensor, Tensor]) -> float:
        """The ratio of gradient norm to quantization noise, against a phase with the same forward and a better backward.

        FP4 All the Way (2505.19115): sigma_q is the RMS, over all d coordinates, of the difference of the two gradients on one
        batch; the ratio is |gradient| / (sigma_q sqrt(d)), the gradient being the better one's. It changes nothing in the run.
        """
        state = checkpoint.rng_state(self.device)
        gradients = []
        for p in (self.phase, phase):
            checkpoint.set_rng_state(state, self.device)
            fp4.switch(self.compiled, p)
            self.loss(*self._put(batch)).backward()
            gradients.append([q.grad.float() for q in self.model.parameters() if q.grad is not None])
            self.optimizer.zero_grad()
        fp4.switch(self.compiled, self.phase)
        checkpoint.set_rng_state(state, self.device)
        count = sum(g.numel() for g in gradients[1])
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients[1]))
        noise = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*gradients, strict=True)))
        ratio = norm / max(noise, sys.float_info.min)
        self.curves.noise.append((self.done, norm, noise / math.sqrt(count), ratio))
        return ratio

    def _compile(self, batch: tuple[Tensor, Tensor]) -> float:
        """One forward and backward, thrown away; seconds."""
        began = time.perf_counter()
        self.loss(*self._put(batch)).backward()
        self._wait()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """One optimizer step. Returns the loss of the batch before it, in nats. Raises TrainError when it is not finite."""
        began = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(self.done, self.curves.phases[-1][0] if self.curves.phases else None)
        loss = self.loss(*self._put(batch))
        loss.backward()
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainError(
                f"recipe {self.recipe}: the loss of step {self.done + 1} is {value}; write a smaller --lr or a longer --warmup"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        self.curves.losses.append(value)
        self.curves.seconds.append(time.perf_counter() - began)
        return value

    def evaluate(self, batches: data.Batches) -> float:
        """Mean loss over held-out text, in nats, by the forward that training runs; it leaves the random state as it was.

        Gradients stay enabled: under no_grad the model would be compiled once more, for the same values.
        """
        state = checkpoint.rng_state(self.device)
        losses = []
        for batch in batches.evaluation(self.settings.eval_batches):
            torch.compiler.cudagraph_mark_step_begin()
            losses.append(self.loss(*self._put(batch)).item())
        checkpoint.set_rng_state(state, self.device)
        value = statistics.fmean(losses)
        self.curves.evals.append([self.done, value])
        return value

    def save(self) -> Path:
        return checkpoint.save(self.folder, self.model, self.optimizer, self.curves, self.device)

    def _put(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.device), batch[1].to(self.device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run(
    settings: Settings, *, resume: bool = False, console: Console | None = None, show_report: bool = False
) -> dict[str, Any]:
    """Trains one model a recipe and returns what ``run.json`` says; docs/training.md describes it.

    resume: go on with the run in ``settings.out``, whose settings must be these. console: where progress is shown (None:
    nowhere). show_report: print each recipe's coverage report. Ctrl-C saves a checkpoint and returns with ``status``
    "interrupted". Raises TrainError for settings that this machine, text or folder cannot meet, and what the backend raises
    for its options.
    """
    require_extra()
    known = fp4.recipes()
    if unknown := [r for r in settings.recipes if r not in known]:
        raise TrainError(f"unknown recipe {', '.join(unknown)}; write one or several of {', '.join(sorted(known))}")
    for recipe in settings.recipes:
        Options.read(model.backend_options(recipe, settings), None)  # an error now rather than when it compiles
        for switch in settings.switches(recipe):
            fp4.recipe(recipe).phase(switch.phase)
    device = _device(settings.device)
    out = Path(settings.out)
    if resume:
        _check_same(settings, Settings.load(out))
    elif (out / "run.json").exists():
        raise TrainError(f"{out} holds a run already; write --resume to go on with it, or another --out")
    console = console or Console(quiet=True)
    with console.status("reading the text, training the tokenizer"):
        corpus = data.prepare(settings.data, settings.vocab, out / "data", reuse=resume)
    training = data.Batches("training", corpus.train, settings.batch, settings.seq, settings.seed)
    held_out = data.Batches("held-out", corpus.held_out, settings.batch, settings.seq, settings.seed)
    info = corpus.info
    size = f"{info.files} files, {info.train_tokens:,} tokens, {info.held_out_tokens:,} more held out"
    console.print(f"{info.source}: {size}", markup=False, soft_wrap=True)
    document: dict[str, Any] = {
        "format": 1,
        "status": "running",
        "settings": settings.to_dict(),
        "machine": results.machine(device),
        "versions": results.versions(),
        "corpus": dataclasses.asdict(info),
        "recipes": results.read(out / "run.json")["recipes"] if resume else {},
    }
    results.write(out / "run.json", document)
    with deterministic(), Stop().installed() as stop:
        for recipe in settings.recipes:
            if document["recipes"].get(recipe, {}).get("steps") == settings.steps:
                continue  # a resumed run that had finished this recipe
            trainer = Trainer(recipe, settings, device, out / recipe)
            with console.status(f"{recipe}: compiling"):
                trainer.start(training.training(0), resume)
            if show_report:
                console.print(trainer.report.table())
            _train(trainer, training, held_out, stop, console, document)
            if stop.requested:
                break
    document["status"] = "interrupted" if stop.requested else "finished"
    results.write(out / "run.json", document)
    plot.draw(document, out / "loss.png")
    return document


def _train(
    trainer: Trainer, training: data.Batches, held_out: data.Batches, stop: Stop, console: Console, document: dict[str, Any]
) -> None:
    """The steps that are left, with evaluations and checkpoints between them, until the end or a request to stop."""
    s = trainer.settings
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(trainer.recipe, total=s.steps, completed=trainer.done, figures="")
        while trainer.done < s.steps and not stop.requested:
            batch = training.training(trainer.done)
            waiting = [x for x in s.switches(trainer.recipe) if x.phase not in {p for _, p in trainer.curves.phases}]
            if s.noise_every and waiting and trainer.done % s.noise_every == 0:
                ratio = trainer.measure_noise(waiting[0].phase, batch)
                console.print(
                    f"{trainer.recipe}, step {trainer.done}: gradient over quantization noise {ratio:.3f}", markup=False
                )
            if (switch := trainer.due()) is not None:
                console.print(f"{trainer.recipe}, step {trainer.done}: phase {switch.phase}", markup=False)
                trainer.switch(switch.phase, batch)
            loss = trainer.step(batch)
            last = trainer.done == s.steps
            figures = f"loss {loss:.4f}, {s.batch * s.seq / trainer.curves.seconds[-1]:,.0f} tokens/s"
            progress.update(task, completed=trainer.done, figures=figures)
            if last or (s.eval_every and trainer.done % s.eval_every == 0):
                trainer.evaluate(held_out)
            if last or stop.requested or (s.checkpoint_every and trainer.done % s.checkpoint_every == 0):
                trainer.save()
                _record(trainer, document)
    _record(trainer, document)


def _record(trainer: Trainer, document: dict[str, Any]) -> None:
    """Brings ``run.json`` up to the trainer's step."""
    entry = results.summary(trainer.curves, trainer.settings, trainer.coverage, trainer.parameters)
    document["recipes"][trainer.recipe] = entry
    results.add_gaps(document["recipes"], trainer.settings.steps)
    results.write(trainer.folder.parent / "run.json", document)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device cuda, but torch sees no CUDA device here; write --device cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _check_same(settings: Settings, saved: Settings) -> None:
    """Raises TrainError for settings that differ from those the run was started with."""
    mine, theirs = settings.to_dict(), saved.to_dict()
    differ = [f"{name} ({theirs[name]!r}, now {mine[name]!r})" for name in mine if mine[name] != theirs[name] and name != "out"]
    if differ:
        raise TrainError(f"a run goes on with the settings it was started with, and these differ: {', '.join(differ)}")
