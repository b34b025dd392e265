"""On a CUDA GPU: cuBLASLt's product with its factor on the device (runtime/cublas.py), equality and speed.

    python -m benchmarks.gpu_products RESULT.json [equality] [speed]

Equality: against the FP32 product, scaled and rounded once: equal bits; the largest error over 2^-24 sum |a||b| and
the rounding to BF16; every layout, odd sizes, operands that are not aligned; in a replayed CUDA graph. Sums short of
FP32's 24 bits must be equal. Speed: TFLOP/s of torch's BF16 product, of the FP32 product alone and with the scaling
kernel after it, and of ours.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernels import graph_seconds
from fp4.runtime import cublas, reference

BF16 = torch.bfloat16
SHAPES = ((1, 1, 1), (5, 7, 64), (130, 144, 200), (257, 3, 33), (1000, 784, 4100), (512, 512, 640), (4096, 4096, 16384))
GEMMS = ((16384, 2048, 2048), (16384, 4096, 4096), (16384, 11008, 4096), (4096, 4096, 16384), (11008, 4096, 16384))


def operand(rows: int, k: int, seed: int, transposed: bool, short: bool, offset: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (k, rows) if transposed else (rows, k)
    if short:
        x = torch.randint(-3, 4, shape, device="cuda", generator=generator).to(BF16)
    else:
        x = torch.randn(shape, device="cuda", generator=generator).to(BF16)
    moved = torch.empty(x.numel() + offset, dtype=BF16, device="cuda")[offset:].view(shape).copy_(x)
    return moved.t() if transposed else moved


def compared(a: Tensor, b: Tensor, alpha: Tensor) -> dict[str, Any]:
    found = cublas.scaled_product(a, b, alpha)
    if found is None:
        return {"no algorithm": True}
    wanted = reference._scaled_sums(a, b, alpha, None, BF16)
    exact = a.double() @ b.double().t() * alpha.double()
    bound = a.double().abs() @ b.double().abs().t() * alpha.double() * 2**-24 + exact.abs() * 2**-8
    return {
        "equal": float((found == wanted).double().mean()),
        "error, of the bound": float(((found.double() - exact).abs() / bound.clamp(min=1e-300)).max()),
        "the FP32 way's": float(((wanted.double() - exact).abs() / bound.clamp(min=1e-300)).max()),
    }


def equality() -> Iterator[dict[str, Any]]:
    alpha = torch.tensor(0.0123, device="cuda")
    for m, n, k in SHAPES:
        for layout in ((False, False), (False, True), (True, False), (True, True)):
            for offset in (0, 1, 8):
                for short in (False, True):
                    a, b = (operand(r, k, r, t, short, offset) for r, t in zip((m, n), layout, strict=True))
                    case = {"M, N, K": (m, n, k), "transposed": layout, "offset": offset, "short sums": short}
                    yield {**case, **compared(a, b, alpha)}
    a, b = operand(256, 512, 0, False, False), operand(384, 512, 1, False, False)
    cublas.scaled_product(a, b, alpha)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cublas.scaled_product(a, b, alpha)
    assert y is not None
    for factor in (0.5, 2.0):
        alpha.fill_(factor)
        y.fill_(float("nan"))
        graph.replay()
        yield {"replayed with factor": factor, "equal": torch.equal(y, reference._scaled_sums(a, b, alpha, None, BF16))}


def speed() -> Iterator[dict[str, Any]]:
    alpha = torch.tensor(0.0123, device="cuda")
    epilogue = torch.compile(lambda y: (y * alpha).to(BF16))
    for m, n, k in GEMMS:
        for name, layout in (("both contiguous", (False, False)), ("b transposed", (False, True))):
            a, b = (operand(r, k, r, t, False) for r, t in zip((m, n), layout, strict=True))
            runs = {
                "bf16": lambda a=a, b=b: torch.mm(a, b.t()),
                "FP32": lambda a=a, b=b: torch.mm(a, b.t(), out_dtype=torch.float32),
                "FP32, scaled": lambda a=a, b=b: epilogue(torch.mm(a, b.t(), out_dtype=torch.float32)),
                "cuBLASLt, scaled": lambda a=a, b=b: cublas.scaled_product(a, b, alpha),
            }
            found = {key: 2e-12 * m * n * k / graph_seconds(run) for key, run in runs.items()}
            yield {"M, N, K": (m, n, k), "layout": name, "TFLOP/s": {key: round(value, 1) for key, value in found.items()}}
            del a, b, runs


def main() -> None:
    path, parts = Path(sys.argv[1]), sys.argv[2:] or ["equality", "speed"]
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "available": cublas.available(torch.device("cuda")),
    }
    for part in parts:
        result[part] = []
        try:
            for row in {"equality": equality, "speed": speed}[part]():
                result[part].append(row)
                path.write_text(json.dumps(result, indent=1) + "\n")
        except Exception as error:
            result[part].append({"failed": f"{type(error).__name__}: {str(error)[:300]}"})
        path.write_text(json.dumps(result, indent=1) + "\n")
    rows = [row for row in result.get("equality", []) if "equal" in row]
    unequal = [row for row in rows if row.get("short sums", True) and row["equal"] < 1]
    print({"available": result["available"], "unequal": unequal[:3]})
    print({"largest error": max((row.get("error, of the bound", 0.0) for row in rows), default=None)})
    print(result.get("speed"))


if __name__ == "__main__":
    main()
