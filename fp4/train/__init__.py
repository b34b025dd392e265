"""Pre-training of a Llama on text, once per recipe: what ``fp4 train`` runs, as ``run(Settings(...))``."""

from __future__ import annotations

from fp4.train.loop import run
from fp4.train.settings import SIZES, Settings, TrainError

__all__ = ["SIZES", "Settings", "TrainError", "run"]
