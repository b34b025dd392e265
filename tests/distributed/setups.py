"""A small decoder under PyTorch's distributed engines, its blocks compiled: what tests and the benchmark of two GPUs run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4

METHODS = ("ddp", "fsdp2", "tp", "sp")
HEAD = 64


@dataclass(frozen=True)
class Size:
    """batch: sequences of the global batch. With `quartet2` a rank's share of every dimension must be a multiple of 128."""

    width: int = 256
    ffn: int = 256
    layers: int = 1
    batch: int = 4
    seq: int = 64
    vocabulary: int = 256


class Norm(nn.Module):
    """RMSNorm in ops that DTensor has rules for in every version."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """(batch, length) token ids to (batch, length, vocabulary) logits. around: what brings activations to a rank, and back."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.ffn) for _ in range(size.layers))
        self.norm, self.head = Norm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.around: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = (lambda x: x, lambda x: x)

    def forward(self, tokens: Tensor) -> Tensor:
        into, out = self.around
        x = into(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(out(x)))


def policy(recipe: str) -> fp4.Policy:
    """The recipe on every linear: the ranks' comparison is not about which layers it keeps."""
    return fp4.recipe(recipe) if recipe == "bf16" else fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)


def build(size: Size, device: str, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(size).to(device)


def compile_blocks(model: Decoder, recipe: str, **options: Any) -> None:
    """Each block on its own, as torchtitan does. ``fallback_random``: the seed is drawn as eager code draws it."""
    settings = {"policy": policy(recipe), "inductor": {"fallback_random": True}, **options}
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="fp4", options=settings)  # type: ignore[assignment]


def distribute(model: Decoder, method: str, recipe: str, device: str, whole_batch: bool = True, **options: Any) -> nn.Module:
    """The model on the ranks of the default group. whole_batch: under data parallelism, amax and draws of the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    if method in ("ddp", "fsdp2"):
        if whole_batch:
            options["batch_group"] = "world"
        compile_blocks(model, recipe, **options)
        if method == "ddp":
            # The graphs stay those of one device: DDPOptimizer would cut them at the buckets, and each part draws its own seed.
            torch._dynamo.config.optimize_ddp = False
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]
    tensor_parallel(model, mesh, sequence=method == "sp")
    compile_blocks(model, recipe, **options)
    return model


def tensor_parallel(model: Decoder, mesh: Any, sequence: bool) -> None:
    """Each block's first linears by columns, the second ones by rows. sequence: activations between them are split along it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    between = Shard(1) if sequence else Replicate()
    first = {name: ColwiseParallel(input_layouts=between) for name in ("q", "k", "v", "gate", "up")}
    second = {name: RowwiseParallel(output_layouts=between) for name in ("o", "down")}
    norms = {name: SequenceParallel() for name in ("norm1", "norm2")} if sequence else {}
    for block in model.blocks:
        parallelize_module(block, mesh, {**first, **second, **norms})
    if sequence:
        model.around = (
            lambda x: DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(1)]).to_local(),
            lambda x: DTensor.from_local(x, mesh, [Shard(1)], run_check=False).full_tensor(),
        )


def batch(size: Size, step: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the global batch: text with structure, so that the loss falls."""
    generator = torch.Generator().manual_seed(100 + step)
    start = torch.randint(0, size.vocabulary, (size.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (size.batch, 1), generator=generator)
    tokens = (start + stride * torch.arange(size.seq + 1)) % size.vocabulary
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def share(method: str, *tensors: Tensor) -> list[Tensor]:
    """This rank's part of the global batch."""
    if method not in ("ddp", "fsdp2"):
        return list(tensors)
    return [t.chunk(dist.get_world_size())[dist.get_rank()] for t in tensors]


def whole(t: Any) -> Tensor:
    """A DTensor gathered; anything else as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def name_of(name: str) -> str:
    """A parameter's name in the model as it was written."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name_of(n): whole(p.grad).detach().cpu() for n, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name_of(n): whole(p).detach().cpu().clone() for n, p in model.named_parameters()}


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Parameter by parameter: AdamW's batched forms refuse DTensors beside tensors."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def train(
    model: nn.Module,
    size: Size,
    steps: range,
    method: str = "one",
    device: str = "cpu",
    optimizer_: torch.optim.Optimizer | None = None,
    autocast: bool = True,
    after: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Training steps on the global batch. Returns the losses (mean over the batch) and the first step's logits and gradients.

    after: called with the number of each step when it is done.
    """
    opt = optimizer_ or optimizer(model)
    found: dict[str, Any] = {"losses": []}
    for step in steps:
        torch.manual_seed(1000 + step)
        inputs, targets = share(method, *batch(size, step, device))
        with torch.autocast(torch.device(device).type, torch.bfloat16) if autocast else contextlib.nullcontext():
            logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        mean = loss.detach().clone()
        if method in ("ddp", "fsdp2"):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found["losses"].append(mean.item())
        if step == steps[0]:
            found |= {"logits": gathered(method, logits.detach()).cpu(), "gradients": gradients(model)}
        opt.step()
        opt.zero_grad()
        if after:
            after(step)
    return found


def gathered(method: str, t: Tensor) -> Tensor:
    """The whole batch's rows."""
    if method not in ("ddp", "fsdp2"):
        return t
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)
