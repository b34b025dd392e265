"""Runs several GPU benchmarks one after the other, each in its own process with a limit of time: a failure loses no other's.

    python -m benchmarks.gpu_all FOLDER [NAME ...]     # the names of RUNS; all when none is given

Results are FOLDER/NAME.json, what they printed FOLDER/log.txt.
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
    "recipes": ("gpu_equality", ("recipes",), 300),
    "losses": ("gpu_equality", ("losses",), 200),
    "speed": ("gpu_kernels", ("speed", "usual"), 240),
    "kernels": ("gpu_kernels", ("equality",), 240),
    "requantize": ("gpu_requantize", (), 300),
    "scaled_mm": ("gpu_scaled_mm", (), 120),
    "linear": ("gpu_step", ("linear",), 400),
    "model": ("gpu_step", ("model",), 300),
    "rivals": ("gpu_rivals", ("--peers", ".peers"), 540),
    "step_ahead": ("gpu_step", ("warm",), 180),
    "rivals_ahead": ("gpu_rivals", ("--peers", ".peers", "--warm"), 300),
}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(RUNS)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        for name in names:
            module, arguments, limit = RUNS[name]
            command = [sys.executable, "-m", f"benchmarks.{module}", str(folder / f"{name}.json"), *arguments]
            log.write(f"== {' '.join(command[1:])}\n")
            log.flush()
            start = time.time()
            try:
                code: int | str = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {limit} s"
            print(f"{name}: exit {code}, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
