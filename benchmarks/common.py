"""What the benchmarks share: a Llama of a given size, and the machine's description beside every figure."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

RESULTS = Path(__file__).parent / "results"


def llama(layers: int, hidden: int, *, vocabulary: int = 4096, positions: int = 256) -> torch.nn.Module:
    """A Llama with random weights: heads of 64, the usual 8/3 feed-forward width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=(hidden * 8 // 3 + 63) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=positions,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def write(name: str, figures: dict[str, Any]) -> None:
    """Write the figures, with the machine and versions they were measured on, to results/NAME.json and to the terminal."""
    from fp4.train.results import machine, versions

    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(torch.device("cpu")), "versions": versions(), **figures}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)
