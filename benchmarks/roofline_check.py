"""`fp4 roofline`'s predictions for an H200 against what ``benchmarks.gpu_step`` measured there.

    python -m benchmarks.roofline_check [RESULT_OF_GPU_STEP.json]

One linear, forward and backward, BF16 and emulated recipes, replayed as CUDA graphs; and a decoder's step. The share of a step
that is no linear comes from the BF16 step, so the BF16 step itself is no check. Writes results/roofline_check.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fp4
from benchmarks.common import RESULTS, write
from benchmarks.step_plot import EARLIER
from fp4.compiler.policy import LinearSite
from fp4.roofline import ROLES, gpu, predict

TOKENS, WIDTH, LAYERS, VOCABULARY = 16384, 2048, 16, 32000  # of benchmarks.gpu_step


def site(name: str, n: int, k: int, index: int = 0, count: int = 1) -> LinearSite:
    return LinearSite(name, index, count, TOKENS, n, k, "torch.bfloat16", "Linear", ROLES)


def decoder() -> list[LinearSite]:
    """The linears of ``benchmarks.gpu_equality.Decoder``."""
    w = WIDTH
    block = [("q", w, w), ("k", w, w), ("v", w, w), ("o", w, w), ("gate", 3 * w, w), ("up", 3 * w, w), ("down", w, 3 * w)]
    found = [(f"blocks.{i}.{name}", n, k) for i in range(LAYERS) for name, n, k in block] + [("lm_head", VOCABULARY, w)]
    return [site(name, n, k, i, len(found)) for i, (name, n, k) in enumerate(found)]


def predicted(sites: list[LinearSite], recipe: str, exact: bool, **inputs: float) -> Any:
    policy = fp4.recipe(recipe) if recipe == "bf16" else fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)
    return predict(sites, gpu("h200").changed(**inputs), recipe, policy, exact)


def compared(what: str, measured: float, milliseconds: float) -> dict[str, Any]:
    return {"what": what, "measured_ms": measured, "predicted_ms": milliseconds, "ratio": milliseconds / measured}


def check(step: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for case in step["linear"]:
        linear = [site("linear", case["N"], case["K"])]
        for name, measured in case["ms"].items():
            run, graphs, _ = name.rpartition(", CUDA graphs")
            recipe, _, fp8 = run.partition(", ")
            if graphs and isinstance(measured, float) and recipe in fp4.recipes():
                milliseconds = 1e3 * predicted(linear, recipe, not fp8).total("fp4")
                found.append(compared(f"linear {case['K']} x {case['N']}, {run}", measured, milliseconds))
    for part in ("model", "mxfp4_h16" + EARLIER):
        steps = {(case["recipe"], case["exact"]): case["ms"] for case in step[part] if isinstance(case, dict)}
        found += decoder_steps(steps)
    return found


def decoder_steps(steps: dict[tuple[str, bool], float]) -> list[dict[str, Any]]:
    """steps: milliseconds of a recipe, exact or not, of one run."""
    sites = decoder()
    rest = 1 - 1e3 * predicted(sites, "bf16", True).total("bf16") / steps["bf16", True]
    found: list[dict[str, Any]] = [{"what": "decoder: share of the BF16 step that is no linear, of the two", "share": rest}]
    for (recipe, exact), measured in steps.items():
        if recipe != "bf16":
            milliseconds = 1e3 * predicted(sites, recipe, exact, rest=rest).step("fp4")
            found.append(compared(f"decoder step, {recipe}{'' if exact else ', FP8'}", measured, milliseconds))
    return found


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "gpu_step_h200.json"
    found = check(json.loads(path.read_text()))
    write("roofline_check", {"measured": path.name, "compared": found})


if __name__ == "__main__":
    main()
