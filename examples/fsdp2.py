"""FSDP2: blocks compiled one by one, then sharded; a checkpoint in the middle, taken up again.

torchrun --nproc-per-node 2 examples/fsdp2.py     # NCCL with a GPU a rank, gloo on a CPU; alone it is one rank
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fp4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(width: int = 128) -> nn.Sequential:
    # Compile, then shard: each block's graph sees whole weights, gathered by FSDP's hooks around it. With
    # "batch_group": "world" the result would be that of one device on the global batch; without it ranks need not talk.
    blocks = [torch.compile(Block(width), backend="fp4", options={"recipe": "quartet2"}) for _ in range(2)]
    model = nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 64))
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(**({} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}))
    torch.manual_seed(0)
    torch.set_default_device(device)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    generator = torch.Generator(device).manual_seed(dist.get_rank())  # each rank its own data
    for step in range(6):
        if step == 3:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
            set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        x = torch.randn(256, 64, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss = (model(x).float() - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(fp4.report(model[1]))
    torch.set_default_device(None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
