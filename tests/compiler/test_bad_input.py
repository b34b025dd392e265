"""What cannot work is refused with an error that names the way out.

Options of the wrong kind: ``test_backend``. Policies that contradict themselves: ``test_policy``.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from typer.testing import CliRunner

import fp4
from fp4.compiler.joint_pass import StrictError
from fp4.compiler.supported import UnsupportedError, check_devices, check_torch
from tests.graphs import MLP, Captured, capturing, compiled

POLICY = fp4.recipe("nvfp4")
X = torch.randn(32, 64)


def compiling(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    with capturing(Captured()):
        return compiled(model, **options)(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "nvfp5"}, r"there is no recipe 'nvfp5'; the recipes: .*nvfp4"),
        ({"recipe": 4}, r"there is no recipe 4; the recipes: "),
        ({"recipies": "nvfp4"}, r"no option 'recipies'; its options: recipe, policy"),
        ({"policy": "nvfp4"}, r"policy='nvfp4' is a str; write an fp4.Policy"),
        ({"policy": {"fprop": fp4.NVFP4()}}, r"is a dict; write an fp4.Policy"),
        ({"policy": fp4.NVFP4()}, r"is a NVFP4; write an fp4.Policy"),
        ({"policy": fp4.LinearPrecision()}, r"is a LinearPrecision; write an fp4.Policy"),
        ({"phase": "qaf"}, r"policy nvfp4 has no phase 'qaf'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        compiling(MLP(), X, **options)


def test_a_policy_function_that_returns_something_else() -> None:
    mine = fp4.policy(lambda site: "nvfp4")  # type: ignore[arg-type, return-value]
    with pytest.raises(BackendCompilerFailed, match="returned 'nvfp4' for a; return an fp4.LinearPrecision"):
        compiling(MLP(), X, policy=mine)


def test_a_device_without_a_lowering() -> None:
    with pytest.raises(
        BackendCompilerFailed, match=r"runs on cpu and cuda, and a tensor of shape .* is on meta; write model.to"
    ):
        compiling(MLP().to("meta"), X.to("meta"))
    check_devices([torch.ones(2), 3, None])


@pytest.mark.parametrize("version", ["2.10.1", "2.5.0+cu124", "1.13.1"])
def test_an_old_torch(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"fp4 needs PyTorch 2.11 or later, and this is .*pip install 'torch>=2.11'"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.15.0a0+git1", "3.0.0", torch.__version__])
def test_a_new_torch(version: str) -> None:
    check_torch(version)


def test_double_backward() -> None:
    """PyTorch's own refusal: a compiled graph has no second derivative, whatever the backend."""
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    with capturing(Captured()):
        (gradient,) = torch.autograd.grad(compiled(MLP())(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradient.sum().backward()


VALUES: list[tuple[Any, str, str]] = [
    (POLICY, "rules", r"Policy.rules cannot be changed.*policy.with_rules"),
    (POLICY, "name", r"Policy.name cannot be changed"),
    (fp4.keep("lm_head"), "patterns", r"Rule.patterns cannot be changed.*another fp4.rule"),
    (POLICY.precision, "fprop", r"LinearPrecision.fprop cannot be changed.*dataclasses.replace\(old, fprop=...\)"),
    (POLICY.precision.fprop, "rotation", r"GemmPrecision.rotation cannot be changed"),
    (POLICY.precision.fprop.first, "quantizer", r"Operand.quantizer cannot be changed"),
]


@pytest.mark.parametrize(("value", "name", "message"), VALUES)
def test_a_policy_changed_in_place(value: Any, name: str, message: str) -> None:
    before = hash(value)
    with pytest.raises(fp4.PolicyError, match=message):
        setattr(value, name, ())
    with pytest.raises(fp4.PolicyError, match="cannot be changed"):
        delattr(value, name)
    with pytest.raises(fp4.PolicyError, match="cannot be changed"):
        value.extra = 1
    assert hash(value) == before
    # What makes a new one still works.
    assert copy.deepcopy(value) == dataclasses.replace(value) == pickle.loads(pickle.dumps(value)) == value


def test_a_quantizer_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fp4.NVFP4().rounding = "stochastic"  # type: ignore[misc]


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these packages were not installed."""
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def _mlir() -> None:
    fp4.explain(MLP(), X).mlir()


def test_mlir_without_torch_mlir(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch_mlir")
    with pytest.raises(fp4.ExplainError, match="mlir needs torch-mlir, which is not installed; write: pip install torch-mlir"):
        _mlir()


@pytest.mark.parametrize("missing", ["transformers", "tokenizers", "matplotlib"])
def test_training_without_a_package(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4.train import settings

    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    from fp4.cli import app

    done = CliRunner().invoke(app, ["train", "--steps", "1"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert missing in done.output
    assert 'pip install "torch-fp4[train]"' in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("wrapped", [False, True])
def test_strict_on_the_command_line_is_an_error_and_no_traceback(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4.cli import app

    def run(*args: Any, **kwargs: Any) -> Any:
        error = StrictError("strict=True, and the policy asked for what could not be done")
        if wrapped:
            raise BackendCompilerFailed(lambda gm, inputs: gm, error, None)
        raise error

    monkeypatch.setattr("fp4.train.run", run)
    done = CliRunner().invoke(app, ["train", "--backend-options", '{"strict": true}'], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "error: strict=True, and the policy asked for what could not be done" in done.output
    assert isinstance(done.exception, SystemExit)
