"""On a CUDA GPU: does the compiled nvfp4 recipe equal the eager oracle bit for bit, and the CPU's codes the GPU's?

    python -m benchmarks.gpu_equality RESULT.json [quantizers] [model] [training] [recipes] [losses]

Five parts, all of them when none is named. Quantizers: codes, scales and tensor scales of the oracle run eagerly on the
CPU and on the GPU, and compiled by Inductor (Triton) on the GPU. Model: outputs and gradients of a compiled MLP against
the eager oracle model on the same GPU. Training: a small Llama-like model, loss by step in bf16 and three recipes, with
the time of a step. Recipes: the MLP again, under every recipe. Losses: of a small Llama-like model under every recipe, compiled
on the GPU, and by the eager oracle model on the CPU; BF16's, without fp4's rewrite, says how far apart two devices are.
"""

from __future__ import annotations

import copy
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp4
from fp4.runtime import reference
from tests.oracle_recipes import OracleModel

QUANTIZERS = (
    fp4.NVFP4(),
    fp4.NVFP4(block=(16, 16)),
    fp4.NVFP4(outer=128),
    fp4.NVFP4(rounding="stochastic"),
    fp4.NVFP4(rounding="stochastic", range_guard=True),
    fp4.NVFP4(four_six=True),
    fp4.MXFP4(),
    fp4.MXFP4(scale_rule="even"),
    fp4.MXFP4(scale_rule="ceil", rounding="stochastic"),
    fp4.MXFP8(),
    fp4.FP8(),
    fp4.FP8(block=(128, 128)),
)


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(257, 272, generator=generator)
    outliers = gaussian.clone()
    outliers[:, 3] *= 50
    outliers[7] *= 0
    return {
        "gaussian": gaussian,
        "outliers and a zero row": outliers,
        "quarter grid": (gaussian * 8).round() / 4,
        "tiny": gaussian * 1e-30,
        "odd": gaussian[:33, :41],
    }


def quantizers() -> list[dict[str, Any]]:
    rows = []
    for q in QUANTIZERS:
        for name, x in data().items():
            for dtype in (torch.bfloat16, torch.float32):
                x_ = x.to(dtype)
                seed = torch.tensor([5])
                on_cpu = reference.quantize(x_, q, None, seed, 3)

                def run(x: torch.Tensor, seed: torch.Tensor, q: fp4.Quantizer = q) -> Any:
                    return reference.quantize(x, q, None, seed, 3)

                on_gpu = run(x_.cuda(), seed.cuda())
                torch._dynamo.reset()
                settings = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
                compiled = torch.compile(run, options=settings, dynamic=False)(x_.cuda(), seed.cuda())
                rows.append(
                    {
                        "quantizer": str(q),
                        "data": name,
                        "dtype": str(dtype),
                        "gpu equals cpu": all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True)),
                        "compiled equals eager": all(torch.equal(a, b) for a, b in zip(on_gpu, compiled, strict=True)),
                    }
                )
    return rows


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(256, 384, bias=False)
        self.b = nn.Linear(384, 256, bias=False)
        self.lm_head = nn.Linear(256, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.b(self.a(x).relu()))


def model(autocast: bool, recipe: str = "nvfp4") -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = MLP().cuda()
    oracle = OracleModel(copy.deepcopy(net), ["a", "b", "lm_head"], ["lm_head"], recipe)
    policy = fp4.recipe(recipe, high_precision_tail=0.0)
    compiled = torch.compile(net, backend="fp4", options={"policy": policy, "inductor": {"fallback_random": True}})
    inputs = [torch.randn(8, 64, 256, device="cuda").requires_grad_() for _ in range(1)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    results = []
    for run, x in zip((compiled, oracle), inputs, strict=True):
        torch.manual_seed(7)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = run(x)
        y.float().square().sum().backward()
        results.append([y, x.grad])
    results[0] += [p.grad for p in net.parameters()]
    results[1] += [p.grad for p in oracle.model.parameters()]
    names = ["y", "dx", "a.weight", "b.weight", "lm_head.weight"]
    return {
        "recipe": recipe,
        "autocast": autocast,
        "equal": {n: torch.equal(a, b) for n, a, b in zip(names, *results, strict=True)},
        "largest difference": {n: (a - b).abs().max().item() for n, a, b in zip(names, *results, strict=True)},
    }


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers: int = 4, width: int = 1024, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.norm(self.blocks(self.embed(tokens[:, :-1]))))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def training(recipe: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Decoder().cuda()
    compiled = torch.compile(net, backend="fp4", options={"recipe": recipe})
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes() * 8), dtype=torch.uint8).long().cuda()
    losses, seconds = [], []
    generator = torch.Generator().manual_seed(1)
    for step in range(60):
        starts = torch.randint(0, len(text) - 513, (8,), generator=generator)
        tokens = torch.stack([text[s : s + 513] for s in starts])
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if step % 10 == 9:
            losses.append(loss.item())
    report = fp4.report(compiled)
    return {
        "recipe": recipe,
        "losses at 10, 20, ... 60": losses,
        "first step, seconds": seconds[0],
        "step milliseconds, least": min(seconds) * 1e3,
        "quantized GEMMs": {role: report.count(role) for role in ("fprop", "dgrad", "wgrad")},
    }


def loss_here_and_on_the_cpu(recipe: str, device: str = "cuda") -> dict[str, Any]:
    """Of weights and tokens that are the same. Forward rounds to nearest in every recipe, so the draws do not matter."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Decoder(layers=2, width=256)
    linears = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    tokens = torch.randint(0, 256, (4, 129))
    oracle: Any = copy.deepcopy(net)
    if recipe != "bf16":
        oracle = OracleModel(oracle, linears, ["lm_head"], recipe)
    with torch.autocast("cpu", torch.bfloat16):
        there = oracle(tokens).item()
    policy = fp4.recipe(recipe) if recipe == "bf16" else fp4.recipe(recipe, high_precision_tail=0.0)
    compiled = torch.compile(net.to(device), backend="fp4", options={"policy": policy})
    with torch.autocast(device, torch.bfloat16):
        here = compiled(tokens.to(device)).item()
    return {"recipe": recipe, "loss": here, "on the CPU, eager": there, "difference": here - there}


def main() -> None:
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    path = Path(sys.argv[1])
    parts: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "model": lambda: (model(autocast) for autocast in (False, True)),
        "training": lambda: (training(name) for name in ("bf16", "nvfp4", "quartet2", "mxfp4_h16")),
        "quantizers": quantizers,
        "recipes": lambda: (model(True, name) for name in fp4.recipes() if name != "bf16"),
        "losses": lambda: (loss_here_and_on_the_cpu(name) for name in fp4.recipes()),
    }
    for part in sys.argv[2:] or parts:
        result[part] = []
        try:
            for row in parts[part]():
                result[part].append(row)
                path.write_text(json.dumps(result, indent=1) + "\n")
        except Exception as error:  # one part's failure must not lose the others' figures
            result[part].append({"failed": f"{type(error).__name__}: {error}"})
        path.write_text(json.dumps(result, indent=1) + "\n")
    rows = result.get("quantizers")
    if rows and not any("failed" in row for row in rows):
        result["quantizers"] = {
            "cases": len(rows),
            "gpu equals cpu": sum(r["gpu equals cpu"] for r in rows),
            "compiled equals eager": sum(r["compiled equals eager"] for r in rows),
            "unequal": [r for r in rows if not (r["gpu equals cpu"] and r["compiled equals eager"])],
        }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
