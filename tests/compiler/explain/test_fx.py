"""Readable code of every stage, and diffs between them."""

from __future__ import annotations

import pytest
import torch

import fp4
from tests.graphs import MLP


@pytest.fixture(scope="module")
def explained() -> fp4.Explanation:
    return fp4.explain(MLP(bias=True), torch.empty(32, 64), recipe="nvfp4")


def test_every_stage_is_python(explained: fp4.Explanation) -> None:
    for stage in explained.stages:
        compile(explained.fx(stage), stage, "exec")


def test_stages_show_what_they_are_named_for(explained: fp4.Explanation) -> None:
    captured, tagged, rewritten = (explained.fx(s) for s in ("captured", "tagged", "rewritten"))
    assert "fp4." not in captured
    assert "# a.weight" in captured
    assert "# a fprop" in tagged
    assert "fp4.quantize" not in tagged
    assert "fp4.quantize" in rewritten
    assert "fp4.quantize" not in explained.fx("lowered")  # on a CPU the oracle's ATen ops


def test_lowered_for_a_gpu_calls_the_kernels() -> None:
    e = fp4.explain(MLP(), torch.empty(32, 64), recipe="nvfp4", target="sm_90")
    text = e.fx("lowered")
    assert "fp4.fake_quantize" in text
    assert "fp4.rotate_quantize" in text  # X for wgrad, whose codes are saved


def test_diff_between_any_two(explained: fp4.Explanation) -> None:
    added = [line for line in explained.diff("tagged", "rewritten").splitlines() if line.startswith("+")]
    assert any("fp4.quantize" in line for line in added)
    assert explained.diff("captured", "captured") == ""
    rotations = explained.diff("assign_precision", "insert_rotation")
    assert "fp4.rotate" in rotations
    assert "fp4.quantize" not in rotations
