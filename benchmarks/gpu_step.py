"""On a CUDA GPU: time and memory of a training step under FP4 recipes, emulated, against compiled BF16 in the same run.

    python -m benchmarks.gpu_step RESULT.json [linear] [model] [others] [warm]

Linear: one linear, forward and backward, 16384 tokens, at three shapes; and two rivals, what anyone writes in an afternoon: a
fake quantizer in an autograd.Function under torch.compile. "plain" quantizes six operands to NVFP4, 1x16, nearest, without a
tensor scale, theirs and ours; theirs of "nvfp4" has tensor scales, square blocks for W, H16 in wgrad and stochastic rounding of
dY. "One thread": with backward in forward's thread, for where the host is the limit. Model: a Llama-like decoder, 2048 wide, 16
layers, 16384 tokens a step, AdamW left out; its GPU time by kernel. Others: the same under the recipes that are left. BF16
parameters. Medians of CUDA-event times. "warm" compiles all of it in several processes, into the caches on disk, and measures
nothing: a run after it is short.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp4
from benchmarks.gpu_equality import Decoder
from benchmarks.gpu_rivals import hadamard

TOKENS = 16384
PROCESSES = 5  # that compile at once, models of 20 to 25 GiB among them
SHAPES = ((2048, 2048), (4096, 4096), (4096, 11008))  # K, N
STEADY = 100  # steps of one linear before those that count, and of these: the host is slower at first
ONE_THREAD = ", one thread"  # backward in the thread of forward (torch.autograd.set_multithreading_enabled(False))
FP8 = ("mxfp4_h16",)  # those whose operands FP8 tensor cores multiply
RECIPES = ("nvfp4", "quartet2", "mxfp4_h16", "mxfp8")


def milliseconds(step: Callable[[], Any], repeats: int = 20, before: int = 5) -> float:
    """Median time of a step, after `before` that are not counted."""
    events = []
    for i in range(repeats + before):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        if i >= before:
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


def fake(x: Tensor, rows: int = 1, scaled: bool = False, stochastic: bool = False) -> Tensor:
    """The rival's quantizer: blocks of rows x 16, E4M3 scales, E2M1, decoded to BF16. scaled: with a tensor scale."""
    b = x.float().unflatten(0, (-1, rows)).unflatten(-1, (-1, 16))
    tensor = b.abs().amax() / (6 * 448) if scaled else 1.0
    s = (b.abs().amax((1, -1), keepdim=True) / 6 / tensor).to(torch.float8_e4m3fn).float().clamp(min=2**-9) * tensor
    a = (b / s).abs().clamp(max=6)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    q = (torch.floor(a / step + torch.rand_like(a)) if stochastic else (a / step).round()) * step
    return (q.clamp(max=6) * b.sign() * s).flatten(-2).flatten(0, 1).to(x.dtype)


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return fake(x) @ fake(w).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return fake(dy) @ fake(w.t()).t(), fake(dy.t()) @ fake(x.t()).t()


class Nvidia(torch.autograd.Function):
    """The recipe `nvfp4`, as its paper says it (NVIDIA 2509.25149)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, h)
        return fake(x, scaled=True) @ fake(w, 16, scaled=True).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, h = ctx.saved_tensors
        dx = fake(dy, scaled=True, stochastic=True) @ fake(w, 16, scaled=True)
        dy, x = (((t.t().unflatten(-1, (-1, 16))) @ h).flatten(-2) for t in (dy, x))
        return dx, fake(dy, scaled=True, stochastic=True) @ fake(x, scaled=True).t(), None


def plain() -> fp4.Policy:
    """What `Plain` does."""
    q = fp4.NVFP4(tensor_scale=False)
    gemm = fp4.GemmPrecision(q, q)
    return fp4.Policy("plain", fp4.LinearPrecision(gemm, gemm, gemm))


def bare(recipe: str) -> fp4.Policy:
    return fp4.recipe(recipe) if recipe == "bf16" else fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)


def linear(k: int, n: int, compile_only: bool = False) -> dict[str, Any]:
    x = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, n, device="cuda", dtype=torch.bfloat16)
    layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    options: dict[str, dict[str, Any]] = {name: {"policy": bare(name)} for name in ("bf16", *RECIPES)}
    options |= {f"{name}, FP8": {"policy": bare(name), "exact": False} for name in FP8}
    options["plain"] = {"policy": plain()}
    options |= {f"{name}, CUDA graphs": {**given, "mode": "reduce-overhead"} for name, given in options.items()}
    runs: dict[str, Callable[..., Any]] = {
        name: torch.compile(layer, backend="fp4", options=given) for name, given in options.items()
    }
    h = hadamard(16, x.device)
    rivals = {"plain": partial(Plain.apply), "nvfp4": lambda x, w: Nvidia.apply(x, w, h)}
    for name, function in rivals.items():
        for mode, tail in ((None, ""), ("reduce-overhead", ", CUDA graphs")):
            compiled = torch.compile(function, mode=mode)
            runs[f"rival's {name}{tail}"] = lambda x, compiled=compiled: compiled(x, layer.weight)
    runs |= {
        f"{name}{ONE_THREAD}": run for name, run in runs.items() if name.removeprefix("rival's ") in ("bf16", "nvfp4", "plain")
    }
    times: dict[str, Any] = {}
    for name, run in runs.items():
        torch._dynamo.reset()

        def step(run: Callable[..., Any] = run) -> None:
            torch.compiler.cudagraph_mark_step_begin()
            x.grad = layer.weight.grad = None
            run(x).backward(dy)

        try:
            with torch.autograd.set_multithreading_enabled(not name.endswith(ONE_THREAD)):
                times[name] = milliseconds(step, 1) if compile_only else milliseconds(step, STEADY, STEADY)
        except Exception as error:
            times[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    over = {}
    for tail in ("", ", CUDA graphs", ONE_THREAD):
        if isinstance(base := times[f"bf16{tail}"], float):
            over |= {m: t / base for m, t in times.items() if isinstance(t, float) and m.endswith(tail)}
    share = {  # of the rival's overhead, for the same recipe
        name: (over[name] - 1) / (over[rival] - 1) for name in over if (rival := f"rival's {name}") in over and over[rival] > 1
    }
    return {"K": k, "N": n, "ms": times, "over bf16": over, "overhead over the rival's": share}


def model(recipe: str, exact: bool = True, compile_only: bool = False) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()  # else the last recipe's parameters may still lie there
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
    if compile_only:
        return {}
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


CASES: dict[str, list[partial[Any]]] = {
    "linear": [partial(linear, k, n) for k, n in SHAPES],
    "model": [
        *(partial(model, name) for name in ("bf16", *RECIPES[:2])),
        *(partial(model, name, exact) for name in FP8 for exact in (False, True)),
    ],
    "others": [partial(model, name) for name in ("bf16", *(n for n in fp4.recipes() if n not in ("bf16", *RECIPES[:2], *FP8)))],
}


def warm(case: Callable[..., Any]) -> None:
    try:
        case(compile_only=True)
    except Exception as error:  # the measurement will meet the same and record it
        print(f"not compiled ahead: {type(error).__name__}: {str(error)[:200]}", flush=True)


def main() -> None:
    parts = [part for part in CASES if part in sys.argv[2:]] or list(CASES)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    path = Path(sys.argv[1])
    if "warm" in sys.argv[2:]:
        ahead = [case for part in parts for case in CASES[part]]
        with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=1) as pool:
            pool.map(warm, ahead, chunksize=1)
        return
    for part in parts:
        result[part] = []
        for case in CASES[part]:
            try:
                result[part].append(case())
            except Exception as error:  # one case's failure must not lose the others' figures
                result[part].append(f"failed: {type(error).__name__}: {str(error)[:500]}")
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
