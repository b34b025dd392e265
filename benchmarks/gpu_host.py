"""On a CUDA GPU: what the host does in a compiled step of one small linear, which is all that such a step takes.

    python -m benchmarks.gpu_host RESULT.json

256 tokens, 512 by 512, forward and backward, without CUDA graphs: microseconds of a step, and by function, the largest first
(by cProfile, which itself slows Python functions down: shares count, not times).
"""

from __future__ import annotations

import cProfile
import json
import platform
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_step import RECIPES, bare

TOKENS, WIDTH, STEPS, TURNS, LISTED = 256, 512, 100, 5, 40


def microseconds(step: Callable[[], None]) -> float:
    """Of a step, the least of a few turns."""
    found = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / STEPS * 1e6)
    return min(found)


def functions(step: Callable[[], None]) -> list[dict[str, Any]]:
    """Calls and microseconds a step of each function itself. Autograd's threads are not seen: backward runs in this one."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.enable()
        for _ in range(STEPS):
            step()
        profile.disable()
    rows = []
    for (path, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = f"{Path(path).parent.name}/{Path(path).name}:{line} {name}" if line else name
        rows.append({"function": place, "calls": calls / STEPS, "us": round(own / STEPS * 1e6, 2)})
    return sorted(rows, key=lambda row: -row["us"])[:LISTED]


def measure(recipe: str) -> dict[str, Any]:
    torch._dynamo.reset()
    layer = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="fp4", options={"policy": bare(recipe)})

    def step() -> None:
        x.grad = layer.weight.grad = None
        compiled(x).backward(dy)

    for _ in range(20):
        step()
    return {"recipe": recipe, "us": round(microseconds(step), 1), "functions": functions(step)}


def main() -> None:
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": [measure(recipe) for recipe in ("bf16", *RECIPES)],
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    for row in result["steps"]:
        print(row["recipe"], row["us"], [(f["function"], f["us"]) for f in row["functions"][:8]])


if __name__ == "__main__":
    main()
