"""Hugging Face Trainer: a model compiled in place. Needs transformers and accelerate.

python examples/engines/hf_trainer.py

``TrainingArguments(torch_compile_backend="fp4")`` is refused by Accelerate, which knows only the backends in its own list.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp4


def main() -> None:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.compile(backend="fp4", options={"recipe": "quartet2"})  # in place: the Trainer saves the model as ever
    tokens = (torch.randint(0, 256, (32, 1)) + torch.arange(64)) % 256
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    print(fp4.report(model))


if __name__ == "__main__":
    main()
