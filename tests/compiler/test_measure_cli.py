"""``fp4 measure`` and ``fp4 suggest``: what they print, write, refuse and return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fp4
from fp4.cli import app

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
batches = [torch.randn(32, 64) for _ in range(2)]


def loss(model, batch):
    return model(batch).float().square().mean()
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a configuration alone."""
    from transformers import LlamaConfig

    make: Any = LlamaConfig
    folder = tmp_path_factory.mktemp("llama")
    make(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def test_measure_a_script(script: str, tmp_path: Path) -> None:
    plot = tmp_path / "heat.svg"
    result = call("measure", script, "--json", "--plot", str(plot), "--scales", str(tmp_path / "scales.png"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sorted((g["linear"], g["role"], g["reason"]) for g in found["gemms"]) == [
        ("0", "fprop", ""),
        ("0", "wgrad", ""),
        ("2", "dgrad", "keep_last(0.15)"),
        ("2", "fprop", "keep_last(0.15)"),
        ("2", "wgrad", "keep_last(0.15)"),
    ]
    assert 0.01 < found["gemms"][0]["relative_error"] < 0.3
    assert "<svg" in plot.read_text()
    assert (tmp_path / "scales.png").exists()


def test_measure_a_configuration(config: str) -> None:
    result = call("measure", config, "--recipe", "mxfp8", "--batch", "2", "--seq", "16", "--markdown")
    assert result.exit_code == 0, result.output
    title, _, head, *_ = result.stdout.splitlines()
    assert title.startswith("policy mxfp8: loss 4.8")  # ln 128 = 4.85
    assert head.startswith("| linear | GEMM |")
    assert "| model.layers.0.self_attn.q_proj | fprop | Y 0.0" in result.stdout
    assert "mxfp8" in result.stdout
    table = call("measure", config, "--recipe", "mxfp8", "--batch", "2", "--seq", "16").stdout
    assert "model.layers.0.mlp.down_proj" in table
    assert "keep heads and routers" in table
    assert not set(table) & set("│┃─━")  # plain in a pipe


def test_measure_names_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(SCRIPT + "\nmodel[2].weight.data[0, 0] = float('inf')\n")
    result = call("measure", str(path), "--dtype", "fp32")
    assert result.exit_code == 1
    assert "NaN or Inf first in 2 fprop W: 1 of 4096 elements" in result.output


def test_suggest_prints_code_that_runs(script: str) -> None:
    result = call("suggest", script, "--budget", "0.5", "--seeds", "1", "--to", "fp8,bf16", "--table")
    assert result.exit_code == 0, result.output
    code = result.stdout[result.stdout.index("# ") :]
    scope: dict[str, Any] = {"fp4": fp4}
    exec(code, scope)
    assert isinstance(scope["policy"], fp4.Policy)
    assert scope["policy"] != fp4.recipe("nvfp4", high_precision_tail=0.0)
    assert "kept in" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "no/such.py"), "there is no script no/such.py"),
        (("measure", "no/such/model"), "no folder of a Hugging Face causal language model"),
        (("measure", "SCRIPT", "--recipe", "nvfp5"), "there is no recipe 'nvfp5'"),
        (("measure", "SCRIPT", "--dtype", "int8"), "write bf16 or fp32"),
        (("measure", "SCRIPT", "--seq", "1"), "write at least"),
        (("suggest", "SCRIPT", "--to", "fp4"), "to='fp4': write one or more of"),
        (("suggest", "SCRIPT", "--budget", "2"), "one share from 0 to 1"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, script: str) -> None:
    result = call(*(script if a == "SCRIPT" else a for a in arguments))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_script_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("batch = 1\n")
    result = call("measure", str(path))
    assert result.exit_code == 2
    assert "defines no global `model`" in result.output
