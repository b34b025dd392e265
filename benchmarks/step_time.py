"""Time of a training step on a CPU, nvfp4 against bf16, in one run: 4 layers, 512 wide, 4 x 256 tokens, BF16 autocast.

    python benchmarks/step_time.py

bf16 is the recipe that rewrites nothing: plain Inductor. A step is forward, backward and a fused AdamW. The two models take
turns, step by step, so that what else the machine does falls on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common import llama, write

LAYERS, HIDDEN, BATCH, LENGTH, STEPS = 4, 512, 4, 256, 12


def stepper(recipe: str) -> tuple[Callable[[], float], float]:
    """A function that takes one step and returns its seconds; and the seconds of the first, which compiles."""
    torch._dynamo.reset()
    model = llama(LAYERS, HIDDEN, positions=LENGTH)
    compiled = torch.compile(model, backend="fp4", options={"recipe": recipe})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 4096, (BATCH, LENGTH))

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step, step()


def main() -> None:
    steps, compile_seconds = {}, {}
    for recipe in ("bf16", "nvfp4"):
        steps[recipe], compile_seconds[recipe] = stepper(recipe)
    times: dict[str, list[float]] = {recipe: [] for recipe in steps}
    for _ in range(STEPS):
        for recipe, step in steps.items():
            times[recipe].append(step())
    median = {recipe: statistics.median(t) for recipe, t in times.items()}
    write(
        "step_time",
        {
            "setting": f"{LAYERS} layers, {HIDDEN} wide, {BATCH} x {LENGTH} tokens, BF16 autocast",
            "step seconds, median": median,
            "step seconds, least": {recipe: min(t) for recipe, t in times.items()},
            "first step with compile, seconds": compile_seconds,
            "nvfp4 over bf16, medians": median["nvfp4"] / median["bf16"],
        },
    )


if __name__ == "__main__":
    main()
