"""The README's lines on a Hugging Face configuration do what they say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import fp4

README = Path(__file__).parents[3] / "README.md"


def test_explain_of_a_hugging_face_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(from transformers import AutoConfig.*?)```", README.read_text(), re.DOTALL)
    assert "num_hidden_layers=16" in block
    exec(block.replace("num_hidden_layers=16", "num_hidden_layers=2"), {"torch": torch, "fp4": fp4})
    assert "model.layers.0.self_attn.q_proj" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama.html", "llama.svg"]
