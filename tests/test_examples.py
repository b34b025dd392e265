"""Every example runs; its graphs are captured and rewritten, no code is generated."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.graphs import Captured, capturing

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[p.stem for p in EXAMPLES])
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    got = Captured()
    with capturing(got):
        runpy.run_path(str(path), run_name="__main__")
    assert got.reports
    assert any(g.quantized for report in got.reports for linear in report.linears for g in linear.gemms)
    assert not any(report.failures or report.warnings for report in got.reports)
    assert "dgrad" in capsys.readouterr().out


def test_new_recipe_is_short() -> None:
    """A recipe from scratch takes less than 30 lines."""
    text = next(p for p in EXAMPLES if p.stem == "new_recipe").read_text()
    body = text[text.index("def mixed") : text.index("def main")]
    assert len(body.strip().splitlines()) < 30
