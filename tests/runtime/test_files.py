"""Files that several processes write."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from fp4.compiler import backend
from fp4.runtime.files import write_whole


def _write(path: Path, start: object, mark: str) -> None:
    start.wait()  # type: ignore[attr-defined]
    for _ in range(300):
        write_whole(path, mark * 5000)


def test_processes_write_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Event()
    path = tmp_path / "made" / "x.json"
    writers = [context.Process(target=_write, args=(path, start, mark)) for mark in "abc"]
    for writer in writers:
        writer.start()
    start.set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert path.read_text() in {mark * 5000 for mark in "abc"}
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_ranks_of_one_seed_store_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that call ``torch.manual_seed(0)`` compile one graph at one time: a draft named by the seed was both ranks'."""
    monkeypatch.setattr(backend, "cache_dir", lambda: str(tmp_path))
    torch.manual_seed(0)
    context = multiprocessing.get_context("fork")
    start = context.Event()

    def store() -> None:
        start.wait()
        for _ in range(300):
            backend._store("key", [])

    ranks = [context.Process(target=store) for _ in range(2)]
    for rank in ranks:
        rank.start()
    start.set()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert json.loads((tmp_path / "fp4" / "key.json").read_text()) == []
