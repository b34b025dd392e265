"""The model that is trained and its optimizer: a plain Hugging Face Llama in FP32, compiled whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp4.train.settings import Settings

BETAS = (0.9, 0.95)


def build(settings: Settings) -> Any:
    """A ``LlamaForCausalLM`` of the settings' size, FP32, on the CPU; its initial weights depend on the seed alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Any = LlamaConfig  # its signature leaves out what every configuration takes
    config = make(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.seq,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=0,  # the end-of-text token is the tokenizer's first entry
        attn_implementation="sdpa",
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(config)


def backend_options(recipe: str, settings: Settings) -> dict[str, Any]:
    """Options of the fp4 backend; torch.compile takes a mode or options, not both, so the mode is one of them."""
    return {"recipe": recipe, "mode": settings.mode, **settings.options}


def compile_loss(model: Any, recipe: str, settings: Settings, device: torch.device) -> tuple[Any, Callable[..., Tensor]]:
    """(compiled model, loss function) of a recipe. The function takes (inputs, targets), (batch, seq) int64, gives FP32 nats.

    The loss is computed inside the model call, so that forward and backward are one joint graph.
    """
    options = backend_options(recipe, settings)
    compiled: Any = torch.compile(model, backend="fp4", options=options, fullgraph=True, dynamic=False)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.dtype == "bf16"):
            # shift_labels: the targets are shifted already; labels alone would drop the last one.
            return compiled(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss

    return compiled, loss


def optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (norm gains are vectors)."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=BETAS, fused=True)
