"""Text to batches: what is read, what is held out, and that it is the same every time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4.train import data
from fp4.train.settings import TrainError


def test_standard_library_is_the_library_proper() -> None:
    files = data.standard_library()
    names = [p.name for p in files]
    assert {"argparse.py", "decimal.py", "os.py"} <= set(names)
    assert not [p for p in files if {"test", "tests", "site-packages", "idlelib"} & set(p.parts[len(files[0].parent.parts) :])]
    assert files == data.standard_library()
    assert len(set(files)) == len(files)


def test_folders_are_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a.txt", ".hidden", ".git/config", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = data.text_files([str(tmp_path), str(tmp_path / "b.txt")])
    assert [str(p.relative_to(tmp_path)) for p in found] == ["a.txt", "a/z.txt", "b.txt", "c.txt", "b.txt"]


def test_what_is_no_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.bin").write_bytes(b"zeros \0 in it")
    (tmp_path / "d.txt").write_text("  \n")
    assert data.documents([str(tmp_path)]) == (str(tmp_path), ["text\n"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent", r"--data .*absent does not exist; name files or folders"),
        (lambda p: p, r"--data .* is a folder without files"),
    ],
)
def test_paths_that_cannot_be_read(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        data.text_files([str(make(tmp_path))])  # type: ignore[operator]


def test_a_folder_of_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TrainError, match="no UTF-8 text in"):
        data.documents([str(tmp_path)])


def test_pieces_are_the_text_cut_at_line_ends() -> None:
    text = "".join(f"line {i} {'x' * (i % 90)}\n" for i in range(500)) + "a last line without an end"
    cut = list(data.pieces(text))
    assert "".join(cut) == text
    assert len(cut) > 3
    assert all(p.endswith("\n") and data.PIECE < len(p) < data.PIECE + 120 for p in cut[:-1])
    assert list(data.pieces("")) == []
    assert list(data.pieces("x" * 3 * data.PIECE)) == ["x" * 3 * data.PIECE]


def test_tokens_are_the_text_and_what_is_held_out_is_in_one_part_only(text: str) -> None:
    corpus, tokenizer = data.build([text], 400)
    documents = [list(data.pieces(document)) for document in data.documents([text])[1]]
    want: dict[bool, str] = {False: "", True: ""}
    i = 0
    for document in documents:
        for j, piece in enumerate(document):
            end = data.END_OF_TEXT if j == len(document) - 1 else ""
            want[i % data.HELD_OUT == data.HELD_OUT - 1] += piece + end
            i += 1
    assert tokenizer.decode(corpus.train.tolist(), skip_special_tokens=False) == want[False]
    assert tokenizer.decode(corpus.held_out.tolist(), skip_special_tokens=False) == want[True]
    assert corpus.train.dtype == np.uint16
    assert (corpus.train == 0).sum() + (corpus.held_out == 0).sum() == len(documents)
    assert corpus.info.vocab == 400
    assert corpus.info.train_tokens == len(corpus.train)


def test_the_end_of_text_in_a_text_is_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(f"say {data.END_OF_TEXT} here, line after line\n" * 2500)
    corpus, _ = data.build([str(file)], 300)
    assert (corpus.train == 0).sum() + (corpus.held_out == 0).sum() == 1


def test_a_vocabulary_above_16_bits_is_kept_in_32(text: str) -> None:
    assert data.build([text], 70000)[0].train.dtype == np.uint32


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("few words\n")
    with pytest.raises(TrainError, match=r"has 10 characters, too few to hold some out; give at least 81920"):
        data.build([str(tmp_path)], 300)
    with pytest.raises(TrainError, match=r"the held-out text has 32 tokens, --seq 32 needs 33"):
        data.Batches("held-out", np.zeros(32, np.uint16), 1, 32, 0)


def test_tokenizer_and_tokens_are_equal_in_other_processes(text: str) -> None:
    corpus, tokenizer = data.build([text], 600)
    mine = f"{corpus.info.digest} {hashlib.sha256(tokenizer.to_str().encode()).hexdigest()}"
    code = (
        "import hashlib, sys; from fp4.train import data; c, t = data.build([sys.argv[1]], 600);"
        "print(c.info.digest, hashlib.sha256(t.to_str().encode()).hexdigest())"
    )
    for threads, hashes in (("1", "1"), ("3", "2")):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": hashes}
        got = subprocess.run([sys.executable, "-c", code, text], env=env, capture_output=True, text=True, check=True)
        assert got.stdout.strip() == mine


def test_prepare_reuses_what_the_run_wrote_only_when_asked(text: str, tmp_path: Path) -> None:
    first = data.prepare([text], 300, tmp_path / "data")
    again = data.prepare(["/absent"], 300, tmp_path / "data", reuse=True)
    assert again.info == first.info
    assert np.array_equal(again.train, first.train)
    assert np.array_equal(again.held_out, first.held_out)
    other = data.prepare([str(Path(text) / "typing.txt")], 300, tmp_path / "data")
    assert other.info.digest != first.info.digest
    assert data.prepare([], 300, tmp_path / "data", reuse=True).info == other.info


def test_an_epoch_is_a_permutation_and_depends_on_seed_and_step_alone() -> None:
    tokens = np.arange(10 * 8 + 5, dtype=np.uint16)  # 10 windows of 8; batches of 3 straddle the epochs
    batches = data.Batches("training", tokens, 3, 8, 7)
    steps = [batches.training(step) for step in range(20)]
    for inputs, targets in steps:
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs + 1, targets)
        assert inputs.shape == (3, 8)
    starts = torch.cat([inputs[:, 0] for inputs, _ in steps]).tolist()
    epochs = [starts[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(0, 80, 8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    fresh = data.Batches("training", tokens, 3, 8, 7)
    assert torch.equal(fresh.training(13)[0], steps[13][0])
    assert not torch.equal(data.Batches("training", tokens, 3, 8, 8).training(0)[0], steps[0][0])


def test_evaluation_is_spread_over_the_text_and_fixed() -> None:
    tokens = np.arange(100 * 4 + 1, dtype=np.uint16)
    batches = data.Batches("held-out", tokens, 5, 4, 0)
    first = [inputs[:, 0].tolist() for inputs, _ in batches.evaluation(4)]
    assert len(first) == 4
    flat = [start for batch in first for start in batch]
    assert flat[0] == 0
    assert flat[-1] == 99 * 4
    assert len(set(flat)) == 20
    assert first == [inputs[:, 0].tolist() for inputs, _ in data.Batches("held-out", tokens, 5, 4, 3).evaluation(4)]
    assert len(list(batches.evaluation(1000))) == 20  # all of the text, once
    assert len(list(data.Batches("held-out", tokens[:9], 5, 4, 0).evaluation(3))) == 1  # shorter than a batch: repeated
