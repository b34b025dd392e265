"""Small models with random weights, made from their libraries' configurations. No download."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BATCH, TOKENS = 2, 19  # no multiple of a block


def ids(batch: int = BATCH, tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(3))


def _transformers() -> Any:
    return pytest.importorskip("transformers")


def _causal(name: str, **changed: Any) -> nn.Module:
    library = _transformers()
    return getattr(library, f"{name}ForCausalLM")(getattr(library, f"{name}Config")(**{**TEXT, **changed}))


def _gpt2() -> nn.Module:
    library = _transformers()
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return library.GPT2LMHeadModel(
        library.GPT2Config(vocab_size=96, use_cache=False, bos_token_id=1, eos_token_id=2, **sizes, **off)
    )


def _bert() -> nn.Module:
    library = _transformers()
    sizes = {k: v for k, v in TEXT.items() if k not in ("num_key_value_heads", "use_cache")}
    return library.BertForMaskedLM(library.BertConfig(**sizes, **ENCODER))


def _vit() -> nn.Module:
    library = _transformers()
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return library.ViTForImageClassification(library.ViTConfig(image_size=16, patch_size=4, num_labels=10, **sizes, **ENCODER))


def _t5() -> nn.Module:
    library = _transformers()
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    sizes["attn_implementation"] = "eager"  # the captured SDPA wants its bias in the dtype of q, under autocast
    return library.T5ForConditionalGeneration(
        library.T5Config(vocab_size=96, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **sizes)
    )


def _mixtral(experts: str) -> nn.Module:
    return _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation=experts)


def _qwen3_moe(experts: str) -> nn.Module:
    return _causal(
        "Qwen3Moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        experts_implementation=experts,
    )


def _mamba2() -> nn.Module:
    library = _transformers()
    sizes: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2}
    return library.Mamba2ForCausalLM(
        library.Mamba2Config(vocab_size=96, num_hidden_layers=1, chunk_size=8, use_cache=False, pad_token_id=0, **sizes)
    )


def _lora() -> nn.Module:
    """Llama with LoRA on two projections: the base frozen, A random, B zero as LoRA starts, then not."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(_causal("Llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _causal("Llama"),
    "qwen3": lambda: _causal("Qwen3", head_dim=16),
    "mistral": lambda: _causal("Mistral", sliding_window=8),
    "gemma": lambda: _causal("Gemma", head_dim=16),
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "mixtral, grouped_mm": lambda: _mixtral("grouped_mm"),
    "qwen3_moe, grouped_mm": lambda: _qwen3_moe("grouped_mm"),
    "mamba2": _mamba2,
    "lora": _lora,
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MODELS[name]().train()


def inputs(name: str) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3))}
    found = {"input_ids": ids()}
    if name == "t5":
        found["decoder_input_ids"] = ids(tokens=7)
    return found
