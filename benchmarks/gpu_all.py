"""Runs several GPU benchmarks, each in its own process with a limit of time: a failure loses no other's.

    python -m benchmarks.gpu_all FOLDER [NAME[+NAME ...] ...]     # the names of RUNS; all when none is given

One after the other; those joined by "+" at once, which is for comparisons and for compiling ahead, not for what is timed.
Results are FOLDER/NAME.json, what they printed FOLDER/NAME.log. For a machine of 16 processors:

    python -m benchmarks.gpu_all FOLDER recipes+losses+requantize+step_ahead kernels others_ahead model others linear speed
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

# Name -> module, arguments after the result's path, seconds.
RUNS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "fp8": ("gpu_fp8", (), 120),
    "fp8_blocks": ("gpu_fp8_blocks", (), 120),
    "both": ("gpu_both", (), 180),
    "products": ("gpu_products", (), 120),
    "host": ("gpu_host", (), 120),
    "recipes": ("gpu_equality", ("recipes",), 300),
    "losses": ("gpu_equality", ("losses",), 200),
    "speed": ("gpu_kernels", ("speed", "usual"), 240),
    "kernels": ("gpu_kernels", ("equality",), 240),
    "requantize": ("gpu_requantize", (), 300),
    "scaled_mm": ("gpu_scaled_mm", (), 120),
    "step_ahead": ("gpu_step", ("linear", "model", "warm"), 180),
    "linear": ("gpu_step", ("linear",), 400),
    "model": ("gpu_step", ("model",), 300),
    "others": ("gpu_step", ("others",), 400),
    "others_ahead": ("gpu_step", ("others", "warm"), 240),
    "rivals_ahead": ("gpu_rivals", ("--peers", ".peers", "--warm"), 300),
    "rivals": ("gpu_rivals", ("--peers", ".peers"), 540),
}


def main() -> None:
    folder, groups = Path(sys.argv[1]), [given.split("+") for given in sys.argv[2:] or RUNS]
    if unknown := [name for names in groups for name in names if name not in RUNS]:
        sys.exit(f"gpu_all: no run {', '.join(unknown)}; write some of {', '.join(RUNS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for names in groups:
        start, running = time.time(), []
        for name in names:
            module, arguments, _ = RUNS[name]
            command = [sys.executable, "-m", f"benchmarks.{module}", str(folder / f"{name}.json"), *arguments]
            with (folder / f"{name}.log").open("w") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        for name, process in zip(names, running, strict=True):
            limit = RUNS[name][2]
            try:
                code: int | str = process.wait(max(1.0, start + limit - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = f"stopped after {limit} s"
            print(f"{name}: exit {code}, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
