"""Hundreds of random stacks of linears, each trained one step through the backend and compared with the eager oracle.

    python -m benchmarks.fuzz [--graphs 500] [--seed 0] [--seconds 900]

Graph-level: the rewritten graph is run op by op, no code is generated. Output and gradients are compared bit for bit. Writes
results/fuzz.json: how many graphs of each recipe, dtype and stride were compared, and every case that failed; exits with 1
where one did. "reported": graphs with a size of 1, which Inductor writes without a product, and the report says so.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

from benchmarks.common import write
from tests import fuzz

QUIET = list(HealthCheck)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    totals: Counter[str] = Counter()
    seen: dict[str, Counter[str]] = {name: Counter() for name in ("recipe", "dtype", "strides", "data", "layers")}
    failures: list[dict[str, Any]] = []
    start = time.perf_counter()

    @hypothesis.seed(asked.seed)
    @settings(
        max_examples=asked.graphs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(fuzz.cases())
    def run(case: fuzz.Case) -> None:
        if time.perf_counter() - start > asked.seconds:
            return
        name, flags = fuzz.RECIPES[case.recipe]
        values = [name + (f" {flags}" if flags else ""), case.dtype + " autocast" * case.autocast, case.strides, case.data]
        for counter, value in zip(seen.values(), [*values, str(len(case.layers))], strict=True):
            counter[value] += 1
        totals["graphs"] += 1
        totals["checkpointed"] += case.checkpointed < len(case.layers)
        totals["no rows"] += 0 in case.rows
        try:
            totals.update(fuzz.check(case))
        except Exception as error:  # counted and printed; the next case runs
            failures.append({"case": repr(case), "error": f"{type(error).__name__}: {error}"[:500]})
            print(failures[-1], file=sys.stderr, flush=True)

    run()
    write(
        "fuzz",
        {
            "seed": asked.seed,
            "seconds": round(time.perf_counter() - start, 1),
            "failed": len(failures),
            "failures": failures,
            **totals,
            "by": {name: dict(sorted(counter.items())) for name, counter in seen.items()},
        },
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
