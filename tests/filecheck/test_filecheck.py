"""Golden checks (FileCheck) of captured and rewritten graphs: NAME.STAGE.check holds what the stage of a case must say.

A check file that any graph satisfied would show nothing: its positive and its negative checks must each fail on the graph of
the other stage.
"""

from __future__ import annotations

import contextlib
import io
from functools import cache
from pathlib import Path

import pytest
from filecheck.matcher import Matcher
from filecheck.options import Options

from tests.filecheck.cases import CASES

HERE = Path(__file__).parent
STAGES = ("captured", "rewritten")


@cache
def _graph(name: str) -> dict[str, str]:
    explained = CASES[name]()
    return {stage: explained.fx(stage) for stage in STAGES}


def failure(text: str, checks: str, folder: Path) -> str | None:
    """FileCheck's message for the first check that does not hold of the text; None when all hold."""
    checked, given = folder / "checks", folder / "text"
    checked.write_text(checks)
    given.write_text(text)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = Matcher.from_opts(Options(str(checked), str(given))).run()
    return None if code == 0 else said.getvalue() or f"exit code {code}"


def _only(checks: str, negative: bool) -> str:
    lines = [line for line in checks.splitlines() if line.startswith("CHECK")]
    return "\n".join(line for line in lines if line.startswith("CHECK-NOT") == negative) + "\n"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, stage: str, tmp_path: Path) -> None:
    checks = (HERE / f"{name}.{stage}.check").read_text()
    assert failure(_graph(name)[stage], checks, tmp_path) is None


@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative"])
@pytest.mark.parametrize("name", CASES)
def test_the_checks_of_the_rewrite_fail_on_an_unrewritten_graph(name: str, negative: bool, tmp_path: Path) -> None:
    checks = _only((HERE / f"{name}.rewritten.check").read_text(), negative)
    assert failure(_graph(name)["captured"], checks, tmp_path) is not None


@pytest.mark.parametrize("name", CASES)
def test_the_checks_of_the_capture_fail_on_a_rewritten_graph(name: str, tmp_path: Path) -> None:
    checks = _only((HERE / f"{name}.captured.check").read_text(), negative=True)
    assert failure(_graph(name)["rewritten"], checks, tmp_path) is not None


def test_every_file_is_a_case() -> None:
    assert {p.name for p in HERE.glob("*.check")} == {f"{n}.{s}.check" for n in CASES for s in STAGES}
