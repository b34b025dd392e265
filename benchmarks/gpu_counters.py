"""The hardware's counters of a few quantize kernels, by Nsight Compute: what limits them.

    ncu --clock-control none --profile-from-start off --set full --metrics $(python -m benchmarks.gpu_counters --metrics) \\
        --csv --page raw python -m benchmarks.gpu_counters > counters.csv
    python -m benchmarks.gpu_counters counters.csv RESULT.json

Instructions are those that warps issue, times 32, over the elements; issue: the share of the schedulers' slots; waiting: of the
cycles that a warp waits to issue, those for memory; L2 fabric: the share of cycles that the link of the two halves of L2 is
busy; sectors: those of 32 bytes that multiprocessors ask of L2, over those that the bytes need which must move. A copy beside.
"""

from __future__ import annotations

import csv
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
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
COPY, BOTH = "copy", "nearest packed, both orientations"
FABRIC = "lts__ltcfabric2ltc_cycles_active.avg.pct_of_peak_sustained_elapsed"
LOADED, STORED = "lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
SHAPE = (16384, 4096)
SCHEDULERS = 4  # of a multiprocessor


def run() -> None:
    """One launch of each case between the profiler's start and stop."""
    import torch
    import triton

    from benchmarks.gpu_both import PAIRS, drawn
    from benchmarks.gpu_kernels import launcher, speed_cases
    from fp4.kernels import both

    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    print("RUN " + json.dumps({"gpu": torch.cuda.get_device_name(), "versions": versions}), flush=True)
    x = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    sides = [drawn(side, x, torch.tensor([5], device="cuda")) for side in PAIRS["nearest, packed"]]
    packed = x.nbytes + sum(t.nbytes for result in both.quantize(x, *sides) for t in result)
    cases: dict[str, tuple[Callable[[], Any], int]] = {
        COPY: (lambda: torch.neg(x, out=y), 2 * x.nbytes),  # copy_ is no kernel
        BOTH: (lambda: both.quantize(x, *sides), packed),
    }
    for name, spec in speed_cases():
        if name in CASES:
            launch, moved = launcher(spec, SHAPE)
            cases[name] = (partial(launch, None), moved)
    for name, (launched, moved) in cases.items():
        for profiled in (False, False, True):
            if profiled:
                torch.cuda.cudart().cudaProfilerStart()
            launched()
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        print(f"CASE {moved} {name}", flush=True)


def summary(text: str) -> dict[str, Any]:
    """Per case what the counters say. text: what ncu and `run` printed."""
    lines = text.splitlines()
    cases = [line.split(" ", 2)[1:] for line in lines if line.startswith("CASE ")]
    head, _, *rows = csv.reader(line for line in lines if line.startswith('"'))
    elements, found = SHAPE[0] * SHAPE[1], {}
    for (moved, name), row in zip(cases, rows, strict=True):
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
            "L2 fabric": round(number(FABRIC) / 100, 2),
            "sectors": round((number(LOADED) + number(STORED)) * 32 / int(moved), 2),
            "warps active": round(number("sm__warps_active.avg.pct_of_peak_sustained_active") / 100, 2),
            "registers": int(number("launch__registers_per_thread")),
        }
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--metrics"]:
        print(",".join((FABRIC, LOADED, STORED)))
    elif len(sys.argv) < 3:
        run()
    else:
        text = Path(sys.argv[1]).read_text()
        (ran,) = (json.loads(line.removeprefix("RUN ")) for line in text.splitlines() if line.startswith("RUN "))
        found = {**ran, "shape": SHAPE, "kernels": summary(text)}
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
