"""The hardware's counters of a few quantize kernels, by Nsight Compute: what limits them.

    ncu --clock-control none --profile-from-start off --set full --csv --page raw \\
        python -m benchmarks.gpu_counters > counters.csv
    python -m benchmarks.gpu_counters counters.csv RESULT.json

Instructions are those that warps issue, times 32, over the elements; issue: the share of the schedulers' slots; waiting: of the
cycles that a warp waits to issue, those for memory.
"""

from __future__ import annotations

import csv
import json
import platform
import sys
from pathlib import Path
from typing import Any

CASES = (
    "nearest decoded",
    "stochastic decoded",
    "four_six decoded",
    "ms_eden H128 decoded",
    "nearest packed",
    "stochastic H16 decoded, along dim 0",
    "nearest packed, along dim 0",
    "nearest H16 packed, along dim 0",
)
SHAPE = (16384, 4096)
SCHEDULERS = 4  # of a multiprocessor


def run() -> None:
    """One launch of each case between the profiler's start and stop."""
    import torch
    import triton

    from benchmarks.gpu_kernels import launcher, speed_cases

    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    print("RUN " + json.dumps({"gpu": torch.cuda.get_device_name(), "versions": versions}), flush=True)
    for name, spec in speed_cases():
        if name in CASES:
            launch, _ = launcher(spec, SHAPE)
            for profiled in (False, False, True):
                if profiled:
                    torch.cuda.cudart().cudaProfilerStart()
                launch(None)
                torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
            print(f"CASE {name}", flush=True)


def summary(text: str) -> dict[str, Any]:
    """Per case what the counters say. text: what ncu and `run` printed."""
    lines = text.splitlines()
    names = [line.removeprefix("CASE ") for line in lines if line.startswith("CASE ")]
    head, _, *rows = csv.reader(line for line in lines if line.startswith('"'))
    elements, found = SHAPE[0] * SHAPE[1], {}
    for name, row in zip(names, rows, strict=True):
        counters = {key: value.replace(",", "") for key, value in zip(head, row, strict=True)}

        def number(key: str, counters: dict[str, str] = counters) -> float:
            return float(counters[key])

        stalls = {
            key: float(value) for key, value in counters.items() if "issue_stalled" in key and key.endswith("active.ratio")
        }
        memory = next(value for key, value in stalls.items() if "long_scoreboard_per" in key)
        issued = number("smsp__inst_executed.sum") / number("smsp__cycles_active.avg") / number("launch__sm_count") / SCHEDULERS
        found[name] = {
            "microseconds": number("gpu__time_duration.sum") / 1e3,
            "instructions an element": round(number("smsp__inst_executed.sum") * 32 / elements, 1),
            "issue": round(issued, 2),
            "ALU pipe": round(number("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active") / 100, 2),
            "FMA pipe": round(number("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active") / 100, 2),
            "waiting for memory": round(memory / sum(stalls.values()), 2),
            "warps active": round(number("sm__warps_active.avg.pct_of_peak_sustained_active") / 100, 2),
            "registers": int(number("launch__registers_per_thread")),
        }
    return found


if __name__ == "__main__":
    if len(sys.argv) < 3:
        run()
    else:
        text = Path(sys.argv[1]).read_text()
        (ran,) = (json.loads(line.removeprefix("RUN ")) for line in text.splitlines() if line.startswith("RUN "))
        found = {**ran, "shape": SHAPE, "kernels": summary(text)}
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
