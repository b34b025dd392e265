"""`fp4 roofline`'s predictions for an H200 against what ``benchmarks.gpu_step`` measured there.

    python -m benchmarks.roofline_check [RESULT_OF_GPU_STEP.json]

One linear, forward and backward, BF16 and emulated recipes, replayed as CUDA graphs; and a decoder's step. The share of a step
that is no linear comes from the BF16 step, so the BF16 step itself is no check. The committed steps are older than the quantize
kernels that ``fp4 roofline`` has the speeds of, so they are compared with a prediction from the speeds of their time; that from
the present ones is beside it, and no step was measured with those. Writes results/roofline_check.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fp4
from benchmarks.common import RESULTS, write
from fp4.compiler.policy import LinearSite
from fp4.roofline import AMAX_SHARES, ROLES, SHARES, gpu, predict

TOKENS, WIDTH, LAYERS, VOCABULARY = 16384, 2048, 16, 32000  # of benchmarks.gpu_step
# SHARES and AMAX_SHARES of the kernels that the committed steps ran with: gpu_kernels_h200.json as of commit 3e2a548.
THEN = {
    "nearest": (0.84, 0.72, 0.71, 0.26),
    "nearest 16x16": (0.72, 0.70, 0.61, 0.36),
    "nearest H16": (0.83, 0.58, 0.62, 0.24),
    "nearest H128": (0.62, 0.38, 0.44, 0.21),
    "stochastic": (0.57, 0.35, 0.30, 0.15),
    "stochastic H16": (0.52, 0.33, 0.32, 0.16),
    "four_six": (0.38, 0.19, 0.06, 0.06),
    "ms_eden H128": (0.40, 0.25, 0.13, 0.10),
    "mxfp4 floor": (0.75, 0.71, 0.84, 0.33),
}
AMAX_THEN = {"amax": (0.78, 0.90), "amax H16": (0.72, 0.65), "amax H128": (0.45, 0.46)}


@contextmanager
def kernels_of_then() -> Iterator[None]:
    with mock.patch.dict(SHARES, THEN), mock.patch.dict(AMAX_SHARES, AMAX_THEN):
        yield


def site(name: str, n: int, k: int, index: int = 0, count: int = 1) -> LinearSite:
    return LinearSite(name, index, count, TOKENS, n, k, "torch.bfloat16", "Linear", ROLES)


def decoder() -> list[LinearSite]:
    """The linears of ``benchmarks.gpu_equality.Decoder``."""
    w = WIDTH
    block = [("q", w, w), ("k", w, w), ("v", w, w), ("o", w, w), ("gate", 3 * w, w), ("up", 3 * w, w), ("down", w, 3 * w)]
    found = [(f"blocks.{i}.{name}", n, k) for i in range(LAYERS) for name, n, k in block] + [("lm_head", VOCABULARY, w)]
    return [site(name, n, k, i, len(found)) for i, (name, n, k) in enumerate(found)]


def predicted(sites: list[LinearSite], recipe: str, **inputs: float) -> Any:
    policy = fp4.recipe(recipe) if recipe == "bf16" else fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)
    return predict(sites, gpu("h200").changed(**inputs), recipe, policy)


def compared(what: str, measured: float, sites: list[LinearSite], recipe: str, rest: float | None = None) -> dict[str, Any]:
    """Milliseconds of the linears, or with `rest` of the step."""

    def milliseconds() -> float:
        if rest is None:
            return 1e3 * predicted(sites, recipe).total("fp4")
        return 1e3 * predicted(sites, recipe, rest=rest).step("fp4")

    with kernels_of_then():
        then = milliseconds()
    ratio = then / measured
    return {"what": what, "measured_ms": measured, "predicted_ms": then, "ratio": ratio, "present_kernels_ms": milliseconds()}


def check(step: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for case in step["linear"]:
        times = case["ms"]
        for name, measured in times.items():
            recipe, _, how = name.partition(", ")
            if how == "CUDA graphs" and isinstance(measured, float):
                linear = [site("linear", case["N"], case["K"])]
                found.append(compared(f"linear {case['K']} x {case['N']}, {recipe}", measured, linear, recipe))
    steps = {case["recipe"]: case["ms"] for case in step["model"] if isinstance(case, dict)}
    sites = decoder()
    rest = 1 - 1e3 * predicted(sites, "bf16").total("bf16") / steps["bf16"]
    found.append({"what": "decoder: share of the BF16 step that is no linear, of the two", "share": rest})
    for recipe, measured in steps.items():
        if recipe != "bf16":
            found.append(compared(f"decoder step, {recipe}", measured, sites, recipe, rest))
    return found


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "gpu_step_h200.json"
    found = check(json.loads(path.read_text()))
    write("roofline_check", {"measured": path.name, "compared": found})


if __name__ == "__main__":
    main()
