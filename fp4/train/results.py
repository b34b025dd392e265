"""What a run writes beside its checkpoints: ``run.json``, and the numbers in it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fp4.runtime.files import write_whole
from fp4.train.checkpoint import Curves
from fp4.train.settings import Settings

BASELINE = "bf16"
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "torch-fp4")


def machine(device: torch.device) -> dict[str, Any]:
    """What the run runs on: device, processor, cores this process may use, threads of torch, GPU (None on a CPU)."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = next(iter(models), cpu)
    return {
        "device": device.type,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the numbers; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def window(steps: int) -> int:
    """Steps over which a training loss is averaged to be stated or drawn: a twentieth of the run."""
    return max(1, steps // 20)


def summary(curves: Curves, settings: Settings, coverage: dict[str, Any], parameters: int) -> dict[str, Any]:
    """One recipe's entry in ``run.json``: the curves and the figures drawn from them; None for what is not known yet."""
    tail = curves.losses[-window(settings.steps) :]
    tokens = settings.batch * settings.seq
    return {
        "steps": len(curves.losses),
        "train_loss": statistics.fmean(tail) if tail else None,
        "eval_loss": curves.evals[-1][1] if curves.evals else None,
        # The median step: the few that another process or an allocation slowed down don't count.
        "tokens_per_second": tokens / statistics.median(curves.seconds) if curves.seconds else None,
        "gap_to_bf16": None,
        "parameters": parameters,
        "coverage": coverage,
        **asdict(curves),
    }


def add_gaps(recipes: dict[str, dict[str, Any]], steps: int) -> None:
    """Fills ``gap_to_bf16`` of each recipe: its loss less that of BF16 over the same batches, in nats.

    train: mean over the last ``window`` steps both have; eval: at the last evaluation of the same step, else None.
    """
    base = recipes.get(BASELINE)
    for name, entry in recipes.items():
        both = min(len(entry["losses"]), len(base["losses"])) if base else 0
        if base is None or name == BASELINE or both == 0:
            continue
        first = max(0, both - window(steps))
        train = statistics.fmean(a - b for a, b in zip(entry["losses"][first:both], base["losses"][first:both], strict=True))
        mine, theirs = dict(entry["evals"]), dict(base["evals"])
        last = max(mine.keys() & theirs.keys(), default=None)
        entry["gap_to_bf16"] = {"train": train, "eval": None if last is None else mine[last] - theirs[last]}


def read(path: Path) -> dict[str, Any]:
    """The results that ``write`` wrote."""
    return json.loads(path.read_text())


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes JSON so that `path` holds the old or the new results, never a part."""
    write_whole(path, json.dumps(results, indent=1, allow_nan=False) + "\n")
