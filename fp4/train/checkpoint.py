"""Checkpoints: all that a run needs to go on bit for bit as if it had never stopped.

``FOLDER/step-00000100/`` holds ``model.safetensors`` and ``config.json`` (``LlamaForCausalLM.from_pretrained`` reads the
folder) and ``trainer.pt`` (optimizer, random states, the curves so far). A folder appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class Curves:
    """What a recipe's training has measured. losses, seconds: one a step, in nats and s; evals: [steps done, nats] each.

    phases: [steps done, phase] of each switch. noise: [steps done, gradient norm, sigma_q, ratio] of each measurement.
    seconds counts the whole step (forward, backward, clipping, optimizer), without evaluations and checkpoints.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evals: list[list[float]] = field(default_factory=list)
    compile_seconds: float = 0.0
    phases: list[tuple[int, str]] = field(default_factory=list)
    noise: list[tuple[int, float, float, float]] = field(default_factory=list)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The random states that a training step on `device` draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Sets what ``rng_state`` read."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in `folder`."""
    return max(folder.glob("step-*"), default=None)


def save(folder: Path, model: Any, optimizer: torch.optim.Optimizer, curves: Curves, device: torch.device) -> Path:
    """Writes the checkpoint of the current step and removes the older ones. Returns its folder."""
    from safetensors.torch import save_file

    final = folder / f"step-{len(curves.losses):08d}"
    part = folder / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file({name: t.cpu() for name, t in model.state_dict().items()}, part / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(part)
    state = {"optimizer": optimizer.state_dict(), "rng": rng_state(device), "curves": asdict(curves)}
    torch.save(state, part / "trainer.pt")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    for old in folder.glob("step-*"):
        if old != final:
            shutil.rmtree(old)
    return final


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Curves, dict[str, Tensor]]:
    """Fills model and optimizer from a checkpoint. Returns the curves, and the random states for ``set_rng_state``."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path / "model.safetensors"))
    state = torch.load(path / "trainer.pt", map_location=device, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return Curves(**state["curves"]), {name: t.cpu() for name, t in state["rng"].items()}
