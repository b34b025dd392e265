"""Lightning: compile the network before the Trainer gets the module. Needs lightning.

python examples/engines/lightning_module.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fp4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        # In place, so that the state dict keeps its names. (On a bare nn.Sequential Dynamo captures nothing this way.)
        self.model.compile(backend="fp4", options={"recipe": "nvfp4"})

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]).float(), batch[1])
        print(f"loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    module = Regression()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.roll(1, dims=1)), batch_size=128))
    print(fp4.report(module.model))


if __name__ == "__main__":
    main()
