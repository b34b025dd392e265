"""On a CUDA GPU: time and memory of a training step under FP4 recipes, emulated, against compiled BF16 in the same run.

    python -m benchmarks.gpu_step RESULT.json [linear] [model]

Linear: one linear, forward and backward, 16384 tokens, at three shapes; and the rival, a plain fake quantizer (NVFP4
1x16 round to nearest, six times, no tensor scale) in an autograd.Function under torch.compile, as anyone writes in an
afternoon. Model: a Llama-like decoder, 2048 wide, 16 layers, 16384 tokens a step, AdamW left out. BF16 parameters.
Medians of CUDA-event times.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp4
from benchmarks.gpu_equality import Decoder

TOKENS = 16384
SHAPES = ((2048, 2048), (4096, 4096), (4096, 11008))  # K, N
FP8 = ("mxfp4_h16",)  # those whose operands FP8 tensor cores multiply
RECIPES = ("nvfp4", "quartet2", "mxfp4_h16", "mxfp8")


def milliseconds(step: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a step, after 5 that are not counted."""
    events = []
    for i in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        if i >= 5:
            events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events)


def gpu_kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """GPU time of one step by kernel, the longest first: how often a step launches it and the microseconds of all together."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: -e.self_device_time_total)
    return {
        "ms": sum(e.self_device_time_total for e in events) / 1000,
        "launches": sum(e.count for e in events),
        "by kernel": {e.key[:90]: [e.count, round(e.self_device_time_total)] for e in events[:32]},
    }


def fake(x: Tensor) -> Tensor:
    """The rival's quantizer: blocks of 16 along the last dimension, E4M3 scales, nearest E2M1, decoded to BF16."""
    b = x.float().unflatten(-1, (-1, 16))
    s = (b.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float().clamp(min=2**-9)
    a = (b / s).abs().clamp(max=6)
    q = torch.where(a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2))
    return (q * b.sign() * s).flatten(-2).to(x.dtype)


class Afternoon(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return fake(x) @ fake(w).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return fake(dy) @ fake(w.t()).t(), fake(dy.t()) @ fake(x.t()).t()


def bare(recipe: str) -> fp4.Policy:
    return fp4.recipe(recipe) if recipe == "bf16" else fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)


def linear(k: int, n: int) -> dict[str, Any]:
    x = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, n, device="cuda", dtype=torch.bfloat16)
    layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    runs: dict[str, Callable[..., Any]] = {}
    for name in ("bf16", *RECIPES):
        runs[name] = torch.compile(layer, backend="fp4", options={"policy": bare(name)})
    for name in FP8:
        runs[f"{name}, FP8"] = torch.compile(layer, backend="fp4", options={"policy": bare(name), "exact": False})
    runs["nvfp4, oracle by Inductor"] = torch.compile(layer, backend="fp4", options={"policy": bare("nvfp4"), "kernels": False})
    for name in ("bf16", *RECIPES):
        graphed: Any = {"policy": bare(name), "mode": "reduce-overhead"}
        runs[f"{name}, CUDA graphs"] = torch.compile(layer, backend="fp4", options=graphed)
        if name in FP8:
            runs[f"{name}, FP8, CUDA graphs"] = torch.compile(layer, backend="fp4", options={**graphed, "exact": False})
    rival = torch.compile(lambda t: Afternoon.apply(t, layer.weight))
    runs["rival: plain fake quantizer"] = rival
    times: dict[str, Any] = {}
    for name, run in runs.items():
        torch._dynamo.reset()

        def step(run: Callable[..., Any] = run) -> None:
            torch.compiler.cudagraph_mark_step_begin()
            x.grad = layer.weight.grad = None
            run(x).backward(dy)

        try:
            times[name] = milliseconds(step)
        except Exception as error:
            times[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    base = times["bf16"]
    return {"K": k, "N": n, "ms": times, "over bf16": {m: t / base for m, t in times.items() if isinstance(t, float)}}


def model(recipe: str, exact: bool = True) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    net = Decoder(layers=16, width=2048, vocabulary=32000).cuda().bfloat16()
    compiled = torch.compile(net, backend="fp4", options={"policy": bare(recipe), "exact": exact})
    tokens = torch.randint(0, 32000, (8, TOKENS // 8 + 1), device="cuda")

    def step() -> Tensor:
        for p in net.parameters():
            p.grad = None
        loss = compiled(tokens)
        loss.backward()
        return loss

    first = step().item()
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(step, 10)
    return {
        "recipe": recipe,
        "exact": exact,
        "first loss": first,
        "ms": ms,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "on the GPU": gpu_kernels(step),
    }


def main() -> None:
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    path = Path(sys.argv[1])
    cases: dict[str, list[Callable[[], Any]]] = {
        "linear": [lambda k=k, n=n: linear(k, n) for k, n in SHAPES],
        "model": [
            *(lambda name=name: model(name) for name in ("bf16", *RECIPES[:3])),
            *(lambda name=name: model(name, exact=False) for name in FP8),
        ],
    }
    for part in sys.argv[2:] or cases:
        result[part] = []
        for case in cases[part]:
            try:
                result[part].append(case())
            except Exception as error:  # one case's failure must not lose the others' figures
                result[part].append(f"failed: {type(error).__name__}: {str(error)[:500]}")
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
