"""The model that is trained and its optimizer: a plain Hugging Face Llama in FP32, compiled whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp4.train.settings import Settings, TrainError

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


def compile_loss(model: Any, recipe: str, settings: Settings, device: torch.device) -> tuple[Any, Callable[..., Tensor]]:
    """(compiled model, loss function) of a recipe. The function takes (inputs, targets), (batch, seq) int64, gives FP32 nats.

    The loss is computed inside the model call, so that forward and backward are one joint graph.
    """
    options: dict[str, Any] = {"recipe": recipe, **settings.options}
    if inductor := mode_options(settings.mode):
        # torch.compile takes a mode or options, not both; a mode is a set of Inductor options.
        options["inductor"] = {**inductor, **options.get("inductor", {})}
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


def mode_options(mode: str) -> dict[str, Any]:
    """The Inductor options that a mode of torch.compile stands for. Raises TrainError for a mode it does not know."""
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise TrainError(f"--mode {mode!r}; write one of {', '.join(known)}")
    return known[mode]
