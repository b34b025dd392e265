"""The command line: what it prints, refuses and returns; `fp4 train` itself in processes of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fp4
import fp4.train
from fp4.cli import app
from fp4.train import Settings, checkpoint

# Every operand is 64 x 64, so that there are few kernels to compile.
SIZE = "--layers 1 --hidden 64 --intermediate 64 --heads 2 --kv-heads 2 --vocab 320 --batch 2 --seq 32"
SMALL = f"{SIZE} --steps 6 --eval-batches 2 --device cpu"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.output.strip()) == (0, importlib.metadata.version("torch-fp4"))


def test_recipes_lists_every_recipe() -> None:
    result = call("recipes")
    assert result.exit_code == 0
    for name, line in fp4.recipes().items():
        assert re.search(rf"^\s*{re.escape(name)}\s+{re.escape(line)}", result.output, re.MULTILINE), name


def test_a_recipe_is_printed_with_its_operands_flags_and_phases() -> None:
    result = call("recipes", "all_the_way")
    assert result.exit_code == 0
    for part in ("2505.19115", "Paper and code", "phase qaf", "range_guard", "dgrad", "keep heads and routers"):
        assert part in result.output
    assert "dY nvfp4[rounding=stochastic]" in result.output
    unknown = call("recipes", "nvfp5")
    assert unknown.exit_code == 2
    assert "there is no recipe 'nvfp5'; the recipes: all_the_way, bf16," in unknown.output


def test_help_describes_every_flag() -> None:
    result = call("train", "--help")
    assert result.exit_code == 0
    for name in Settings().to_dict():
        flag = "--backend-options" if name == "options" else "--" + name.replace("_", "-")
        assert flag in result.output, flag
    for flag in ("--resume", "--report", "--size"):
        assert flag in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "nvfp5"], "error: unknown recipe nvfp5; write one or several of all_the_way, bf16,"),
        (["--recipes", ","], "error: no recipe; name at least one"),
        (["--size", "huge"], "error: --size 'huge'; write one of tiny, small, medium, large"),
        (["--data", "/absent"], "error: --data /absent does not exist; name files or folders of text, or leave --data out"),
        (["--backend-options", "strict"], "error: --backend-options 'strict' is not JSON"),
        (["--backend-options", '{"stricter": true}'], "error: backend fp4 has no option 'stricter'"),
        (["--backend-options", "[1]"], "error: --backend-options '[1]' is not a JSON object"),
        (["--resume"], "error: --resume goes on with a run, and nothing says which; write --out FOLDER"),
        (["--resume", "--out", "absent"], "error: absent holds no run (no run.json in it)"),
    ],
)
def test_errors_say_what_to_write(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("train", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_square_brackets_of_an_error_are_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are markup to rich: the extra's name was swallowed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    result = call("train", "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert 'needs transformers, not installed here; install with: pip install "torch-fp4[train]"' in result.output


def test_resume_takes_no_other_settings(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"settings": Settings().to_dict()}))
    result = call("train", "--resume", "--out", str(tmp_path), "--lr", "1e-3", "--backend-options", "{}", "--report")
    assert result.exit_code == 2
    assert f"takes the settings from {tmp_path}/run.json; leave out --lr, --backend-options, or start" in result.output


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command asks of `run`, which is replaced: it answers with a run that was stopped."""
    calls: list[Any] = []

    def run(settings: Settings, **values: Any) -> dict[str, Any]:
        calls.append((settings, values["resume"], values["show_report"]))
        return {"status": "interrupted"}

    monkeypatch.setattr(fp4.train, "run", run)
    return calls


def test_flags_become_settings(asked: list[Any]) -> None:
    line = (
        "--recipes nvfp4,bf16 --size small --layers 3 --intermediate 512 --data a --data b --steps 50 --batch 3 --seq 64 "
        "--lr 0.01 --warmup 7 --weight-decay 0 --clip 2 --seed 5 --device cpu --dtype fp32 --mode max-autotune "
        "--eval-every 4 --eval-batches 2 --checkpoint-every 6 --out somewhere --report"
    )
    call("train", *line.split(), "--backend-options", '{"strict": true}')
    settings = Settings(
        recipes=("nvfp4", "bf16"), data=("a", "b"), layers=3, hidden=256, intermediate=512, heads=4, kv_heads=2, vocab=4096,
        steps=50, batch=3, seq=64, lr=0.01, warmup=7, weight_decay=0, clip=2, seed=5, device="cpu", dtype="fp32",
        mode="max-autotune", options={"strict": True}, eval_every=4, eval_batches=2, checkpoint_every=6, out="somewhere",
    )  # fmt: skip
    assert asked == [(settings, False, True)]


def test_without_flags_the_settings_are_the_defaults(asked: list[Any]) -> None:
    result = call("train")
    [(settings, resume, report)] = asked
    assert re.fullmatch(r"runs/\d{8}-\d{6}", settings.out)
    assert settings == Settings(out=settings.out)
    assert (resume, report) == (False, False)
    assert result.exit_code == 130
    assert f"To go on: fp4 train --out {settings.out} --resume" in result.output


def command(text: str, out: Path, *more: str) -> list[str]:
    flags = ["--data", text, *SMALL.split()] if "--resume" not in more else []
    return [sys.executable, "-c", "from fp4.cli import main; main()", "train", "--out", str(out), *flags, *more]


@pytest.mark.slow
def test_stopped_by_ctrl_c_and_resumed_in_another_process(text: str, tmp_path: Path) -> None:
    """Bit for bit the run that was never stopped, with every process compiling for itself."""
    flags = ["--steps", "400", "--recipes", "nvfp4", "--eval-every", "100"]
    environment = {**os.environ, "COLUMNS": "120"}
    subprocess.run(command(text, tmp_path / "whole", *flags), env=environment, check=True, capture_output=True)
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(
        command(text, stopped, *flags, "--checkpoint-every", "5"), env=environment, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 600
    while checkpoint.latest(stopped / "nvfp4") is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    assert f"To go on: fp4 train --out {stopped} --resume" in output
    assert json.loads((stopped / "run.json").read_text())["status"] == "interrupted"
    steps = json.loads((stopped / "run.json").read_text())["recipes"]["nvfp4"]["steps"]
    assert 5 <= steps < 400
    done = subprocess.run(command(text, stopped, "--resume"), env=environment, check=True, capture_output=True, text=True)
    assert "nvfp4" in done.stdout
    whole, resumed = (json.loads((tmp_path / n / "run.json").read_text())["recipes"]["nvfp4"] for n in ("whole", "stopped"))
    assert resumed["losses"] == whole["losses"]
    assert resumed["evals"] == whole["evals"]
    weights = [(tmp_path / n / "nvfp4" / "step-00000400" / "model.safetensors").read_bytes() for n in ("whole", "stopped")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_table_and_the_report(text: str, tmp_path: Path) -> None:
    line = command(text, tmp_path / "run", "--report")
    done = subprocess.run(line, env={**os.environ, "COLUMNS": "160"}, capture_output=True, text=True, check=True)
    results = json.loads((tmp_path / "run" / "run.json").read_text())["recipes"]
    for name, entry in results.items():
        numbers = f"{entry['train_loss']:.4f}", f"{entry['eval_loss']:.4f}"
        assert re.search(rf"{name}\W+{numbers[0]}\W+{numbers[1]}\W", done.stdout), name
    assert f"{results['nvfp4']['gap_to_bf16']['eval']:+.4f}" in done.stdout
    assert "q_proj" in done.stdout
    assert f"{tmp_path}/run/loss.png" in done.stdout
