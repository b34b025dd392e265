"""One linear at every level, and the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fp4
from fp4.cli import app
from fp4.compiler.explain import levels, mlir
from tests.graphs import MLP

SCRIPT = """
import torch
def model():
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
inputs = (torch.empty(32, 64),)
"""


def test_graph_and_mlir_of_one_linear() -> None:
    e = fp4.explain(MLP(), torch.empty(32, 64, requires_grad=True), recipe="quartet2")
    found = e.levels("b")
    stages = dict(found.graph)
    assert list(stages) == ["captured", "rewritten", "lowered, forward", "lowered, backward"]
    assert stages["captured"].count("aten.mm(") == 3
    assert re.findall(r"# (\w+ \w+)$", stages["rewritten"], re.MULTILINE) == ["b fprop", "b wgrad", "b dgrad"]
    assert "aten.relu" not in stages["rewritten"]
    assert found.kernels == ()
    mlir.parse(found.mlir)
    assert set(re.findall(r'linear = "(\w+)"', found.mlir)) == {"b"}
    with pytest.raises(fp4.ExplainError, match="no linear 'd'; write one of a, b, c"):
        e.levels("d")


@pytest.mark.parametrize(
    ("recipe", "options", "op"),
    [
        ("mxfp8", {"target": "sm_100a"}, "scaled_mm"),
        ("mxfp8", {"target": "sm_100a", "library": True}, "library_scaled_mm"),
        ("mxfp4_h16", {"target": "sm_90", "exact": False}, "fp8_mm"),
        ("fp8", {"target": "sm_90", "exact": False}, "fp8_block_mm"),
    ],
    ids=str,
)
def test_products_of_codes(recipe: str, options: dict[str, Any], op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_kernels", lambda calls, target: ())
    x = torch.empty(128, 64, requires_grad=True)  # fewer tokens than a block: the decoded operand is saved
    e = fp4.explain(MLP(), x, recipe=recipe, **options)
    graph = dict(e.levels("a").graph)
    assert graph["lowered, forward"].count(f"fp4.{op}(") == 1
    assert graph["lowered, backward"].count(f"fp4.{op}(") == 2
    for part in e.mlir("lowered").split("\nmodule"):
        mlir.parse(part if part.startswith("module") else f"module{part}")


def test_products_that_cublas_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_kernels", lambda calls, target: ())
    x = torch.empty(128, 64, requires_grad=True)
    graph = dict(fp4.explain(MLP(), x, recipe="mxfp8", target="sm_90", autocast=torch.bfloat16).levels("a").graph)
    for part, products in (("forward", 1), ("backward", 2)):
        assert graph[f"lowered, {part}"].count("fp4.product(") == products
        assert graph[f"lowered, {part}"].count("fp4.fake_quantize(") >= products


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "target", "product"), [("nvfp4", "sm_90", None), ("quartet2", "sm_100a", "fp4.scaled_mm")])
def test_kernels_down_to_sass(recipe: str, target: str, product: str | None) -> None:
    x = torch.empty(32, 64, requires_grad=True)
    found = fp4.explain(MLP(), x, recipe=recipe, target=target, autocast=torch.bfloat16).levels("a")
    assert found.kernels
    for kernel in found.kernels:
        assert "tt.func" in kernel.ttir
        assert "ttg." in kernel.ttgir
        assert f".target {target}" in kernel.ptx
        assert re.search(r"^\s+/\*\w+\*/\s+EXIT", kernel.sass, re.MULTILINE)
        compile(kernel.source, "kernel", "exec")
    assert any(k.op.startswith("fp4.scaled_mm") for k in found.kernels) == (product is not None)
    titles = [title.split()[0] for title, _ in found.sections()]
    assert titles[:5] == ["FX,", "FX,", "FX,", "FX,", "MLIR,"]
    assert titles[5:10] == ["Triton", "TTIR", "TTGIR", "PTX", "SASS"]


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(SCRIPT)
    return str(tmp_path / "model.py")


def test_a_script_on_the_command_line(script: str, tmp_path: Path) -> None:
    assert _run(script).splitlines()[0] == "policy nvfp4, training"
    assert json.loads(_run(script, "--json"))["totals"]["linears"] == 2
    assert _run(script, "--markdown", "--inference").splitlines()[0] == "policy nvfp4, inference"
    assert _run(script, "--diff", "captured,tagged").startswith("--- captured\n+++ tagged\n")
    assert "fp4.quantize" in _run(script, "--stage", "rewritten")
    mlir.parse(_run(script, "--mlir", "rewritten"))
    assert "==== MLIR, rewritten" in _run(script, "--linear", "0")
    lowered = ("--recipe", "mxfp8", "--stage", "lowered", "--target")
    assert "fp4.scaled_mm" in _run(script, *lowered, "sm_100a")
    assert "fp4.library_scaled_mm" in _run(script, *lowered, "sm_100a", "--library")
    assert "fp4.fp8_mm" in _run(script, "--recipe", "mxfp4_h16", *lowered[2:], "sm_90", "--no-exact")
    with pytest.raises(AssertionError, match="native_draws=True"):
        _run(script, "--target", "sm_90", "--native-draws")
    files = [str(tmp_path / name) for name in ("m.svg", "m.html")]
    assert _run(script, "--draw", files[0], "--html", files[1]).split() == files
    assert all(Path(f).stat().st_size > 2000 for f in files)


def test_a_hugging_face_model_type_on_the_command_line() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2}
    changes = [x for name, value in sizes.items() for x in ("--set", f"{name}={value}")]
    text = _run("llama", *changes, "--batch", "2", "--seq", "32", "--recipe", "quartet2")
    assert "model.layers.0-1.self_attn.q_proj" in text
    assert text.count("keep heads and routers") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "there is no file nothing.py"),
        (["no/such/model"], "is no script and no model that can be configured"),
        (["llama", "--set", "layers"], "write NAME=VALUE"),
        (["llama", "--dtype", "fp16"], "write bf16 or fp32"),
    ],
)
def test_errors_on_the_command_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.stderr)
