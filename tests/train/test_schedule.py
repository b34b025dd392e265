"""Phases in the middle of a run: by step, by fraction, by measured noise; and a run resumed after a switch."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4
from fp4.train import Settings, TrainError, loop, run
from fp4.train.schedule import Switch
from tests.graphs import Captured, capturing
from tests.train.test_train_run import small, state_digest

RECIPE = "all_the_way"


def trained(settings: Settings, resume: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The recipe's results, and the policy of each graph compiled, without generating code."""
    torch._dynamo.reset()
    got = Captured()
    with capturing(got):
        results = run(settings, resume=resume)
    return results["recipes"][RECIPE], [r.policy for r in got.reports]


@pytest.mark.parametrize(
    ("text", "steps", "expected"),
    [
        ("all_the_way:qaf@80", 100, Switch(RECIPE, "qaf", 80)),
        (" all_the_way:qaf@0.9 ", 100, Switch(RECIPE, "qaf", 90)),
        ("all_the_way:qaf@sqrt3", 100, Switch(RECIPE, "qaf", None)),
    ],
)
def test_forms(text: str, steps: int, expected: Switch) -> None:
    assert Switch.parse(text, steps) == expected


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("all_the_way", "write RECIPE:PHASE@WHEN"),
        ("all_the_way:qaf@late", "'late' says no step"),
        ("all_the_way:qaf@300", "step 300 is not inside a run of 300 steps"),
        ("all_the_way:qaf@0", "step 0 is not inside"),
        ("nvfp4:bf16@0.5", "names nvfp4, which is not among --recipes all_the_way"),
        ("all_the_way:qaf@sqrt3", "write --noise-every 50"),
    ],
)
def test_refused(schedule: str, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        Settings(recipes=(RECIPE,), schedule=(schedule,))


def test_an_unknown_phase_is_an_error_before_the_first_step(text: str, tmp_path: Path) -> None:
    with pytest.raises(fp4.PolicyError, match="its phases: qaf"):
        run(small(text, tmp_path / "run", recipes=(RECIPE,), schedule=("all_the_way:late@3",)))


def test_rewarm() -> None:
    settings = Settings(steps=100, warmup=0, rewarm=4, recipes=(RECIPE,), schedule=("all_the_way:qaf@50",))
    rates = [settings.learning_rate(i, 50) / settings.learning_rate(i) for i in range(50, 56)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_switch_at_a_step(text: str, tmp_path: Path) -> None:
    """The losses are the unscheduled run's up to the switch, and no longer after it; one compile a phase."""
    plain, _ = trained(small(text, tmp_path / "plain", recipes=(RECIPE,)))
    switched, policies = trained(small(text, tmp_path / "run", recipes=(RECIPE,), schedule=("all_the_way:qaf@3",)))
    assert switched["phases"] == [(3, "qaf")]
    assert policies == [RECIPE, f"{RECIPE}:qaf"]
    assert switched["losses"][:4] == plain["losses"][:4]  # the loss of step 4 is of the weights before it
    assert switched["losses"][4:] != plain["losses"][4:]


def test_noise_changes_nothing_and_decides(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = trained(small(text, tmp_path / "plain", recipes=(RECIPE,)))
    schedule = ("all_the_way:qaf@sqrt3",)
    measured, _ = trained(small(text, tmp_path / "run", recipes=(RECIPE,), schedule=schedule, noise_every=2))
    assert [n[0] for n in measured["noise"]] == [0, 2, 4]
    for _, norm, sigma, ratio in measured["noise"]:
        assert ratio == pytest.approx(norm / (sigma * math.sqrt(measured["parameters"])))
        assert ratio > loop.CRITICAL_RATIO  # 6 steps from random weights
    assert measured["losses"] == plain["losses"]
    assert measured["phases"] == []
    monkeypatch.setattr(loop, "CRITICAL_RATIO", 1e9)
    forced, _ = trained(small(text, tmp_path / "forced", recipes=(RECIPE,), schedule=schedule, noise_every=2))
    assert forced["phases"] == [(0, "qaf")]
    assert len(forced["noise"]) == 1  # nothing left to wait for


def test_resumed_after_a_switch_is_never_stopped(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"recipes": (RECIPE,), "schedule": ("all_the_way:qaf@2",), "rewarm": 3}
    whole, _ = trained(small(text, tmp_path / "whole", **values))
    step = loop.Trainer.step

    def stopping(self: loop.Trainer, batch: Any) -> float:
        if self.done == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stopping)
        stopped, _ = trained(small(text, tmp_path / "stopped", **values))
    assert stopped["steps"] == 4
    resumed, policies = trained(small(text, tmp_path / "stopped", **values), resume=True)
    assert policies == [f"{RECIPE}:qaf"]
    assert resumed["losses"] == whole["losses"]
    assert state_digest(tmp_path / "stopped", RECIPE, 6) == state_digest(tmp_path / "whole", RECIPE, 6)
