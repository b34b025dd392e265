"""Switches of phase in the middle of a run, by step or by the measured noise of the quantized gradient."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

FORM = "write RECIPE:PHASE@WHEN with WHEN a step (800), a fraction of the steps (0.9) or sqrt3, e.g. all_the_way:qaf@0.9"
CRITICAL_RATIO = math.sqrt(3)


@dataclass(frozen=True)
class Switch:
    """From some step on `recipe` trains in its phase `phase`.

    step: steps done before it; None: when the ratio of gradient norm to quantization noise falls below sqrt(3), the
    criterion of FP4 All the Way (2505.19115): below it, noise as large in every coordinate takes away the descent.
    """

    recipe: str
    phase: str
    step: int | None

    @staticmethod
    def parse(text: str, steps: int) -> Switch:
        """The switch that `text` describes, in a run of `steps` steps. Raises ValueError with the form to write."""
        found = re.fullmatch(r"(\w+):(\w+)@([\w.]+)", text.strip())
        if found is None:
            raise ValueError(f"--schedule {text!r}; {FORM}")
        recipe, phase, when = found.groups()
        if when == "sqrt3":
            return Switch(recipe, phase, None)
        try:
            step = int(when) if when.isdigit() else round(float(when) * steps)
        except ValueError:
            raise ValueError(f"--schedule {text!r}: {when!r} says no step; {FORM}") from None
        if not 0 < step < steps:
            raise ValueError(f"--schedule {text!r}: step {step} is not inside a run of {steps} steps; {FORM}")
        return Switch(recipe, phase, step)
