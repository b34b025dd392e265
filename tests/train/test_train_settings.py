"""Settings: refusals that say what to write, the learning rate, the round trip through JSON."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fp4 import cli
from fp4.train import SIZES, Settings, TrainError
from fp4.train.settings import require_extra


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipes": ()}, "no recipe; name at least one"),
        ({"recipes": ("bf16", "bf16")}, "name one twice"),
        ({"steps": 0}, "--steps 0 is less than 1"),
        ({"kv_heads": 0}, "--kv-heads 0 is less than 1"),
        ({"eval_every": -1}, "--eval-every -1 is negative"),
        ({"lr": float("nan")}, "--lr nan is no learning rate"),
        ({"lr": 0.0}, "--lr 0.0 is no learning rate"),
        ({"hidden": 100, "heads": 3}, "--hidden 100 does not split into 3 heads of an even width; write a multiple of 6"),
        ({"heads": 4, "kv_heads": 3}, "--kv-heads 3 does not divide --heads 4"),
        ({"vocab": 256}, "--vocab 256 .*write 257 or more"),
        ({"steps": 10, "warmup": 11}, "--warmup 11 is longer than the run of 10 steps"),
        ({"device": "tpu"}, "--device 'tpu'; write one of auto, cpu, cuda"),
        ({"dtype": "fp16"}, "--dtype 'fp16'; write one of bf16, fp32"),
        ({"options": {"recipe": "nvfp4"}}, "leave recipe out of the backend's options: --recipes and --mode say it"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        Settings(**values)


def test_sizes_are_valid_and_the_help_names_them() -> None:
    for name, size in SIZES.items():
        settings = Settings.sized(name)
        assert {key: getattr(settings, key) for key in size} == size
        assert name in cli.SIZES_HELP
        assert f"{size['layers']}" in cli.SIZES_HELP
        assert f"of {size['hidden']}" in cli.SIZES_HELP
    assert Settings.sized("small", layers=3).layers == 3
    with pytest.raises(TrainError, match="--size 'huge'; write one of tiny, small, medium, large"):
        Settings.sized("huge")


@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 320), (256, 704), (640, 1728), (768, 2048), (16, 64)])
def test_the_mlp_is_eight_thirds_wide(hidden: int, intermediate: int) -> None:
    assert Settings(hidden=hidden).intermediate == intermediate
    assert Settings(hidden=hidden, intermediate=96).intermediate == 96


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    settings = Settings(steps=101, warmup=10, lr=1.0)
    assert [settings.learning_rate(i) for i in range(10)] == [(i + 1) / 10 for i in range(10)]
    assert settings.learning_rate(10) == 1.0
    assert settings.learning_rate(100) == 0.1
    assert settings.learning_rate(55) == pytest.approx(0.55, abs=1e-12)
    falling = [settings.learning_rate(i) for i in range(10, 101)]
    assert falling == sorted(falling, reverse=True)
    assert Settings(steps=1, warmup=0, lr=1.0).learning_rate(0) == 1.0
    assert Settings(steps=300).warmup == 30


def test_settings_come_back_from_json(tmp_path: Path) -> None:
    settings = Settings(recipes=("nvfp4",), data=("a", "b"), options={"strict": True}, out="elsewhere")
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings.to_dict()}))
    assert Settings.load(tmp_path) == dataclasses.replace(settings, out=str(tmp_path))
    with pytest.raises(TrainError, match=r"holds no run \(no run.json in it\)"):
        Settings.load(tmp_path / "absent")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extra()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(TrainError, match=r'needs transformers, not installed here; .*pip install "torch-fp4\[train\]"'):
        require_extra()
