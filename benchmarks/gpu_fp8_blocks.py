"""On a Hopper GPU: FP8 codes with FP32 block scales multiplied by cuBLAS, error and speed.

    python -m benchmarks.gpu_fp8_blocks RESULT.json [products] [library] [step] [speed]

Products: ``fp4::fp8_block_mm`` of what the kernels quantize, against the FP64 product of the decoded operands and beside the
emulated product: the largest error over sum |a||b| in units of 2^-24, where one FP32 rounding a sum is about 1; exactly, where
sums are short of FP32's 24 bits; where either is NaN. Library: what ``scaled_mm`` takes beyond what we ask of it. Step: one
compiled linear, forward and backward, its gradients against the emulated ones, its time against BF16. Speed: TFLOP/s against
BF16, with and without the layout of the scales. What fails is in the result, as its error.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_fp8 import error
from benchmarks.gpu_kernels import graph_seconds
from benchmarks.gpu_step import bare, milliseconds
from fp4.kernels import fp8_blocks, fp8_ops  # noqa: F401  registers the op
from fp4.kernels.quantize import quantize
from fp4.runtime import reference
from fp4.runtime.layout import transpose_codes
from fp4.runtime.spec import FP8

ROW, SQUARE = FP8(), FP8(block=(128, 128))
PAIRS = ((ROW, SQUARE), (ROW, ROW), (SQUARE, ROW))
# M, N, K; the first have lengths that are no multiples of 4, 16 or 128.
SHAPES = (
    (1, 1, 1),
    (5, 7, 64),
    (130, 144, 200),
    (1000, 784, 4100),
    (256, 384, 128),
    (512, 512, 640),
    (1024, 1024, 4096),
    (4096, 4096, 16384),
)
DATA = ("gaussian", "spread", "tiny", "huge", "short sums", "NaN")
GEMMS = ((16384, 2048, 2048), (16384, 4096, 4096), (16384, 11008, 4096), (4096, 4096, 16384), (11008, 4096, 16384))
STEPS = ((2048, 2048), (4096, 4096), (4096, 11008), (1000, 3000))  # K, N
TOKENS = 16384

Case = dict[str, Any]


def attempt(case: Case, run: Callable[[], Case]) -> Case:
    """The case and what it gave, or its error: one failure must not lose the others' figures."""
    try:
        return {**case, **run()}
    except Exception as failure:
        return {**case, "failed": f"{type(failure).__name__}: {str(failure)[:300]}"}


def draw(rows: int, k: int, seed: int, data: str) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, k, device="cuda", generator=generator)
    if data == "spread":  # 2^20 between rows, and between blocks of K
        x *= torch.exp2(torch.arange(rows, device="cuda") % 21 - 10.0)[:, None]
        x *= torch.exp2(torch.arange(k, device="cuda") // 128 % 21 - 10.0)
    elif data in ("tiny", "huge"):  # scales of 2^-67, whose product alone is a denormal number, or of 2^38
        x *= 2.0 ** (-60 if data == "tiny" else 45)
    elif data == "short sums":  # 1 or 7 in blocks of scale 2^-6: fewer than 2^18 products sum exactly in 24 bits
        x = torch.randint(0, 2, x.shape, device="cuda", generator=generator) * 6.0 + 1.0
        x[:, ::128] = 7.0
    elif data == "NaN":
        x[rows // 2, k // 2] = torch.nan
        x[rows // 3] = 0.0
    return x


def operand(x: Tensor, q: FP8) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the decoded operand in FP32."""
    codes, scales, _ = quantize(x, q)
    return codes, scales, reference.decode(codes, scales, q, x.shape[1], torch.float32)


def product(shape: tuple[int, int, int], pair: tuple[FP8, FP8], data: str, transposed: bool) -> Case:
    m, n, k = shape
    a, a_scales, first = operand(draw(m, k, 0, data), pair[0])
    if transposed:  # saved codes of W, as dgrad reads them
        w, w_scales, decoded = operand(draw(k, n, 1, data), pair[1])
        b, b_scales, second = transpose_codes(w, n, 128, False), w_scales.t(), decoded.t().contiguous()
    else:
        b, b_scales, second = operand(draw(n, k, 1, data), pair[1])
    call = partial(torch.ops.fp4.fp8_block_mm, a, a_scales, b, b_scales, str(pair[0]), str(pair[1]), k)
    y, rounded = call(None, torch.float32), call(None, torch.bfloat16)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    z = reference.mm(first, second, None, None, torch.float32)
    finite = ~z.isnan()
    clean = (first.nan_to_num(0.0), second.nan_to_num(0.0))
    return {
        "FP8 error": error(torch.where(finite, y, (clean[0].double() @ clean[1].double().t()).float()), *clean),
        "emulated error": error(torch.where(finite, z, (clean[0].double() @ clean[1].double().t()).float()), *clean),
        "equals the emulated": torch.equal(y[finite], z[finite]),
        "NaN where the emulated is": torch.equal(y.isnan(), z.isnan()),
        "NaN": int(z.isnan().sum()),
        "BF16 output is the FP32 one rounded": torch.equal(rounded[finite], y[finite].bfloat16()),
        "bias added to FP32": torch.equal(call(bias, torch.bfloat16)[finite], (y + bias.float())[finite].bfloat16()),
    }


def products() -> Iterator[Case]:
    for shape in SHAPES:
        for pair in PAIRS:
            for data in DATA:
                case = {"M, N, K": shape, "pair": " x ".join(map(str, pair)), "data": data}
                yield attempt(case, partial(product, shape, pair, data, False))
        yield attempt(
            {"M, N, K": shape, "pair": "transposed", "data": "spread"}, partial(product, shape, PAIRS[0], "spread", True)
        )


def library() -> Iterator[Case]:
    """``scaled_mm`` on arguments that we pad, convert or keep from it."""

    def call(m: int, n: int, k: int, formats: tuple[str, str] = ("e4m3", "e4m3"), **more: Any) -> Case:
        dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        made = [operand(draw(r, k, i, "gaussian"), q) for i, (r, q) in enumerate(((m, ROW), (n, SQUARE)))]
        (a, a_scales, first), (b, b_scales, second) = made
        kind = torch.nn.functional.ScalingType
        matrices = [x.view(torch.float8_e4m3fn).to(dtypes[f]) for x, f in zip((a, b), formats, strict=True)]
        y = torch.nn.functional.scaled_mm(
            matrices[0],
            matrices[1].t(),
            a_scales.t().contiguous().t(),
            kind.BlockWise1x128,
            torch.nn.functional.pad(b_scales, (0, -b_scales.shape[1] % 4)).t(),
            kind.BlockWise128x128,
            **more,
        )
        want = first @ second.t() + (more["bias"].float() if "bias" in more else 0)
        return {"relative error": float((y.float() - want).norm() / want.norm())}

    def bias() -> Tensor:
        return torch.randn(256, device="cuda", dtype=torch.bfloat16)

    asked: dict[str, Callable[[], Case]] = {
        "whole blocks": lambda: call(256, 256, 512, output_dtype=torch.bfloat16),
        "M = 250": lambda: call(250, 256, 512, output_dtype=torch.bfloat16),
        "M = 252": lambda: call(252, 256, 512, output_dtype=torch.bfloat16),
        "N = 272": lambda: call(256, 272, 512, output_dtype=torch.bfloat16),
        "N = 250": lambda: call(256, 250, 512, output_dtype=torch.bfloat16),
        "bias, BF16 output": lambda: call(256, 256, 512, bias=bias(), output_dtype=torch.bfloat16),
        "FP16 output": lambda: call(256, 256, 512, output_dtype=torch.float16),
        "E5M2 x E4M3": lambda: call(256, 256, 512, ("e5m2", "e4m3"), output_dtype=torch.bfloat16),
        "E4M3 x E5M2": lambda: call(256, 256, 512, ("e4m3", "e5m2"), output_dtype=torch.bfloat16),
    }
    for name, run in asked.items():
        yield attempt({"case": name}, run)


def step() -> Iterator[Case]:
    for k, n in STEPS:
        yield attempt({"K, N": (k, n), "tokens": TOKENS}, partial(linear, k, n))


def linear(k: int, n: int) -> Case:
    x = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, n, device="cuda", dtype=torch.bfloat16)
    layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    results: dict[str, list[Tensor]] = {}
    times: dict[str, float] = {}
    for name, recipe, exact in (("bf16", "bf16", True), ("emulated", "fp8", True), ("FP8", "fp8", False)):
        torch._dynamo.reset()
        run = torch.compile(layer, backend="fp4", options={"policy": bare(recipe), "exact": exact})

        def once(run: Any = run, name: str = name) -> None:
            x.grad = layer.weight.grad = None
            y = run(x)
            y.backward(dy)
            results[name] = [y, x.grad, layer.weight.grad]  # type: ignore[list-item]

        times[name] = milliseconds(once)
    pairs = zip(results["FP8"], results["emulated"], strict=True)
    differences = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    return {"ms": times, "Y, dX, dW against the emulated": differences}


def speed() -> Iterator[Case]:
    for m, n, k in GEMMS:
        a, b = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
        yield attempt({"M, N, K": (m, n, k), "product": "bf16"}, lambda a=a, b=b: rate(partial(torch.mm, a, b.t()), a, b))
        for pair in PAIRS[:2]:
            case = {"M, N, K": (m, n, k), "product": " x ".join(map(str, pair))}
            yield attempt(case, partial(speed_of, a, b, pair))


def rate(run: Callable[[], Any], a: Tensor, b: Tensor) -> Case:
    return {"TFLOP/s": 2 * a.shape[0] * b.shape[0] * a.shape[1] / graph_seconds(run) / 1e12}


def speed_of(a: Tensor, b: Tensor, pair: tuple[FP8, FP8]) -> Case:
    codes = [t for x, q in zip((a, b), pair, strict=True) for t in quantize(x, q)[:2]]
    blocks = (pair[0].block, pair[1].block)
    given = fp8_blocks.arguments(*codes, blocks)
    runs = {
        "TFLOP/s": partial(fp8_blocks.mm, *codes, blocks, None, torch.bfloat16),
        "FP32 out": partial(fp8_blocks.mm, *codes, blocks, None, torch.float32),
        "scaled_mm alone": partial(torch.nn.functional.scaled_mm, **given, output_dtype=torch.bfloat16),
    }
    return {name: rate(run, a, b)["TFLOP/s"] for name, run in runs.items()}


def main() -> None:
    parts: dict[str, Callable[[], Iterator[Case]]] = {"products": products, "library": library, "step": step, "speed": speed}
    result: Case = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "multiplies": fp8_blocks.multiplies(torch.device("cuda")),
    }
    for name in sys.argv[2:] or parts:
        result[name] = []
        for row in parts[name]():
            result[name].append(row)
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    rows = [row for name in parts for row in result.get(name, [])]
    print(f"{sum('failed' in row for row in rows)} of {len(rows)} failed; multiplied by cuBLAS: {result['multiplies']}")
    print(json.dumps({n: result[n] for n in ("library", "step", "speed") if n in result}, indent=1))


if __name__ == "__main__":
    main()
