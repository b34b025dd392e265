"""Accelerate: compile the model, then prepare it.

accelerate launch --num-processes 2 examples/engines/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fp4


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(512, 64)
    loader = DataLoader(TensorDataset(x, x.roll(1, dims=1)), batch_size=128)
    # Accelerate's own dynamo_backend knows only the names in its list.
    compiled = torch.compile(model, backend="fp4", options={"recipe": "nvfp4"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled, optimizer, loader = accelerator.prepare(compiled, optimizer, loader)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(compiled(inputs).float(), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.4f}")
    accelerator.print(fp4.report(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
