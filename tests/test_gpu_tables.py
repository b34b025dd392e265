"""The tables of docs/kernels.md are those of the committed runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernel_plot, step_plot

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("run", "tables"), [("gpu_step", step_plot.tables), ("gpu_kernels", kernel_plot.tables)])
def test_every_row_is_in_the_docs(run: str, tables: Callable[[Any], str]) -> None:
    written = (ROOT / "docs" / "kernels.md").read_text().splitlines()
    made = tables(json.loads((ROOT / "benchmarks" / "results" / f"{run}_h200.json").read_text()))
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert len(rows) >= 9
    assert [row for row in rows if row not in written] == []
