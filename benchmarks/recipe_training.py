"""Table and plot of docs/recipes.md: a short training run under every recipe, from the run.json files of ``fp4 train``.

    OMP_NUM_THREADS=1 fp4 train --out runs/recipes --steps 800 --vocab 512 --batch 4 --seq 128 --lr 4e-3 --eval-every 200 \\
        --recipes bf16,mxfp8,fp8,fp4_forward,nvfp4,quartet2,quartet,mxfp4_h16,all_the_way,mxfp4_rht,tetrajet2
    python -m benchmarks.recipe_training runs/recipes/run.json

Several files are one table: a recipe of a later file takes the place of an earlier one's. With --keep, recipes that no file has
keep their rows of the table on disk, and no plot is drawn. Step times are the tenth percentile of a run's steps, since other
work on the machine only ever adds to one.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from fp4.train import plot, results

PLOT = Path(__file__).parents[1] / "docs" / "plots" / "recipes.png"


def main() -> None:
    keep = "--keep" in sys.argv
    runs = [results.read(Path(p)) for p in sys.argv[1:] if p != "--keep"]
    run: dict[str, Any] = {**runs[0], "recipes": {k: v for r in runs for k, v in r["recipes"].items()}}
    results.add_gaps(run["recipes"], run["settings"]["steps"])
    saved = json.loads((RESULTS / "recipe_errors.json").read_text())["recipes"]
    table = {}
    for name, entry in run["recipes"].items():
        table[name] = {
            "train loss": entry["train_loss"],
            "held-out loss": entry["eval_loss"],
            "gap to bf16": entry["gap_to_bf16"],
            "step milliseconds": statistics.quantiles(entry["seconds"], n=10)[0] * 1e3,
            "compile seconds": entry["compile_seconds"],
            "X saved, bytes over BF16's": saved[name]["saved bytes"] / saved["bf16"]["saved bytes"],
        }
    kept = {k: run[k] for k in ("machine", "versions", "settings")}
    kept["settings"].pop("out")
    seed = run["settings"]["seed"]
    name_of_run = "recipe_training" + (f"_seed{seed}" if seed else "")
    path = RESULTS / f"{name_of_run}.json"
    if keep:
        before = json.loads(path.read_text())
        table = before["recipes"] | table
        kept["settings"]["recipes"] = before["settings"]["recipes"]
        if before["settings"] != kept["settings"]:
            sys.exit(f"recipe_training: {path.name} is of other settings; run every recipe, without --keep")
    path.write_text(json.dumps({**kept, "recipes": table}, indent=1) + "\n")
    if not seed and not keep:
        plot.draw(run, PLOT)
    base = table["bf16"]["step milliseconds"]
    head = ("recipe", "held-out loss", "gap, training", "gap, held-out", "step over bf16's", "X saved, of BF16's")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, row in table.items():
        gap = row["gap to bf16"]
        gaps = f"{gap['train']:+.3f} | {gap['eval']:+.3f}" if gap else " | "
        cost, kept_bytes = row["step milliseconds"] / base, row["X saved, bytes over BF16's"]
        print(f"| `{name}` | {row['held-out loss']:.3f} | {gaps} | {cost:.1f} | {kept_bytes:.3f} |")


if __name__ == "__main__":
    main()
