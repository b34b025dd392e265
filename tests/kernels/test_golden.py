"""The generator writes the sources that are committed under tests/kernels/golden."""

from __future__ import annotations

import difflib

import pytest

from tests.kernels import golden


@pytest.mark.parametrize("name", golden.CASES)
def test_generated_source(name: str) -> None:
    want = golden.path(name).read_text() if golden.path(name).exists() else ""
    got = golden.generated(name)
    diff = "".join(difflib.unified_diff(want.splitlines(True), got.splitlines(True), f"golden/{name}.py", "generated"))
    assert not diff, f"{diff}\nif the change is meant: python -m tests.kernels.golden"


def test_no_file_is_left_of_a_case_that_is_gone() -> None:
    assert {p.stem for p in golden.FOLDER.glob("[!_]*.py")} == set(golden.CASES)
