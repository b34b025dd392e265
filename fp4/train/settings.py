"""The settings of a training run: a frozen value, checked when it is built, written to ``run.json``."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4.train.schedule import Switch

# Model sizes by name. `medium` has the shape of the 30M models of the FP4 papers, before their 32k vocabulary.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 2048},
    "small": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab": 4096},
    "medium": {"layers": 6, "hidden": 640, "heads": 10, "kv_heads": 10, "vocab": 16384},
    "large": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "vocab": 32000},
}
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("bf16", "fp32")
EXTRA = 'pip install "torch-fp4[train]"'


class TrainError(ValueError):
    """A run that cannot be done as asked; the message says what is wrong and what to write instead."""


@dataclass(frozen=True)
class Settings:
    """What a run does. Raises TrainError when a value, or two together, cannot work.

    recipes: names of ``fp4.recipes()``; one model each, from the same weights and over the same batches.
    data: files or folders of text; empty: the Python standard library's source.
    layers, hidden, heads, kv_heads, vocab: the Llama; intermediate 0 is 8/3 of hidden, rounded to a multiple of 64.
    steps, batch, seq: optimizer steps, sequences a step, tokens a sequence.
    lr, warmup: peak learning rate and steps of linear warm-up (-1: a tenth of the steps); a cosine down to lr/10 follows.
    schedule: switches of phase, "RECIPE:PHASE@WHEN" each (``fp4.train.schedule``). rewarm: steps of linear warm-up after one.
    noise_every: steps between measurements of the quantization noise in the gradient of a scheduled recipe, 0 for none.
    weight_decay: AdamW's, on matrices only. clip: largest global gradient norm, 0 for no limit.
    eval_every: steps between evaluations, 0 for one at the end only; eval_batches: batches of held-out text in each.
    checkpoint_every: steps between checkpoints, 0 for one at the end only.
    dtype: "bf16", FP32 parameters under autocast; or "fp32".
    mode: a mode of ``torch.compile``. options: further options of the fp4 backend.
    out: the run's folder.
    """

    recipes: tuple[str, ...] = ("bf16", "nvfp4")
    data: tuple[str, ...] = ()
    layers: int = SIZES["tiny"]["layers"]
    hidden: int = SIZES["tiny"]["hidden"]
    intermediate: int = 0
    heads: int = SIZES["tiny"]["heads"]
    kv_heads: int = SIZES["tiny"]["kv_heads"]
    vocab: int = SIZES["tiny"]["vocab"]
    steps: int = 300
    batch: int = 8
    seq: int = 256
    lr: float = 2e-3
    warmup: int = -1
    weight_decay: float = 0.1
    clip: float = 1.0
    schedule: tuple[str, ...] = ()
    rewarm: int = 0
    noise_every: int = 0
    seed: int = 0
    device: str = "auto"
    dtype: str = "bf16"
    mode: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)
    eval_every: int = 0
    eval_batches: int = 8
    checkpoint_every: int = 0
    out: str = "runs/train"

    def __post_init__(self) -> None:
        for name in ("recipes", "data", "schedule"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.intermediate == 0:
            object.__setattr__(self, "intermediate", max(64, round(self.hidden * 8 / 3 / 64) * 64))
        if self.warmup == -1:
            object.__setattr__(self, "warmup", self.steps // 10)
        if not self.recipes:
            raise TrainError("no recipe; name at least one, e.g. bf16,nvfp4")
        if len(set(self.recipes)) != len(self.recipes):
            raise TrainError(f"recipes {', '.join(self.recipes)} name one twice; name each once")
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "steps", "batch", "seq", "eval_batches"):
            if getattr(self, name) < 1:
                raise TrainError(f"{_flag(name)} {getattr(self, name)} is less than 1; write a positive number")
        for name in ("warmup", "rewarm", "weight_decay", "clip", "seed", "eval_every", "checkpoint_every", "noise_every"):
            if getattr(self, name) < 0:
                raise TrainError(f"{_flag(name)} {getattr(self, name)} is negative; write 0 or more")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise TrainError(f"--lr {self.lr} is no learning rate; write a positive number, e.g. 1e-3")
        if self.hidden % (2 * self.heads):
            raise TrainError(
                f"--hidden {self.hidden} does not split into {self.heads} heads of an even width; "
                f"write a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise TrainError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; write a divisor of it")
        if not 257 <= self.vocab <= 2**31:
            raise TrainError(f"--vocab {self.vocab} has no room for the 256 bytes and the end of text; write 257 or more")
        if self.warmup > self.steps:
            raise TrainError(f"--warmup {self.warmup} is longer than the run of {self.steps} steps; write {self.steps} or less")
        switches = [self._switch(text) for text in self.schedule]
        if unused := [s.recipe for s in switches if s.recipe not in self.recipes]:
            raise TrainError(f"--schedule names {', '.join(unused)}, which is not among --recipes {', '.join(self.recipes)}")
        if any(s.step is None for s in switches) and not self.noise_every:
            raise TrainError("--schedule ...@sqrt3 needs the noise measured; write --noise-every 50, say")
        for name, known in (("device", DEVICES), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise TrainError(f"{_flag(name)} {getattr(self, name)!r}; write one of {', '.join(known)}")
        if set_elsewhere := sorted({"recipe", "policy", "phase", "mode"} & set(self.options)):
            raise TrainError(f"leave {', '.join(set_elsewhere)} out of the backend's options: --recipes and --mode say it")

    @classmethod
    def sized(cls, size: str, **values: Any) -> Settings:
        """The settings of a named size with some values changed. Raises TrainError for an unknown size."""
        if size not in SIZES:
            raise TrainError(f"--size {size!r}; write one of {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **values})

    @classmethod
    def load(cls, out: str | Path) -> Settings:
        """The settings that the run in folder `out` was started with. Raises TrainError when there is no run."""
        path = Path(out) / "run.json"
        if not path.exists():
            raise TrainError(f"{out} holds no run (no run.json in it); start one: leave out --resume")
        saved = json.loads(path.read_text())["settings"]
        return cls(**{**saved, "out": str(out)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, read back by ``Settings(**values)``."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def _switch(self, text: str) -> Switch:
        try:
            return Switch.parse(text, self.steps)
        except ValueError as error:
            raise TrainError(str(error)) from None

    def switches(self, recipe: str) -> list[Switch]:
        """The scheduled switches of a recipe, in order; those by measured noise last."""
        mine = [s for s in map(self._switch, self.schedule) if s.recipe == recipe]
        return sorted(mine, key=lambda s: math.inf if s.step is None else s.step)

    def learning_rate(self, step: int, switched: int | None = None) -> float:
        """The rate of step `step` (from 0): linear warm-up, then a cosine from lr to lr/10.

        switched: the step of the last switch of phase; after it the rate rises from 0 again, over `rewarm` steps.
        """
        if switched is not None and step - switched < self.rewarm:
            return self.learning_rate(step) * (step - switched + 1) / self.rewarm
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def require_extra() -> None:
    """Raises TrainError naming the packages of the `train` extra that are missing and how to install them."""
    missing = [n for n in ("transformers", "tokenizers", "safetensors", "matplotlib") if importlib.util.find_spec(n) is None]
    if missing:
        raise TrainError(f"training needs {', '.join(missing)}, not installed here; install with: {EXTRA}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
