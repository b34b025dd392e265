"""On a CUDA GPU of compute capability 8.9 or 9.0: MXFP4 operands as FP8 tensors, equality, error and speed.

    python -m benchmarks.gpu_fp8 RESULT.json [operands] [products] [speed]

Operands: the kernel against the oracle (runtime/fp8.py) on the CPU: values, factor, counts. Products: ``torch._scaled_mm`` of
two such operands, and the BF16 product of the same operands, each against FP64: the largest error over sum |a||b| in units of
2^-24, where one FP32 rounding a sum is about 1; and exactly, where sums are short of FP32's 24 bits. Speed: the kernel as a
share of a device copy of the bytes it moves, a few tiles; the largest scale; TFLOP/s of both products.
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
from torch import Tensor

from benchmarks.gpu_kernels import copy_rate, graph_seconds
from fp4.kernels import fp8 as kernels
from fp4.kernels.launch import launcher
from fp4.kernels.quantize import quantize
from fp4.kernels.target import target_of
from fp4.kernels.tiles import Tile, tile_of
from fp4.runtime import fp8, reference
from fp4.runtime.spec import MXFP4

FORMATS = list(fp8.REACH)
SHAPES = ((1, 32), (1, 96), (33, 64), (64, 512), (70, 1056), (0, 64), (1000, 4096))
PRODUCTS = ((16, 16, 32), (5, 7, 64), (130, 144, 224), (257, 3, 64), (1000, 784, 4096), (4096, 4096, 16384))  # M, N, K
SIZES = ((16384, 4096), (4096, 11008))
GEMMS = ((16384, 2048, 2048), (16384, 4096, 4096), (16384, 11008, 4096), (4096, 4096, 16384), (11008, 4096, 16384))
TILES = ((1, 128, 2, 2), (1, 128, 4, 4), (2, 64, 2, 2), (4, 32, 2, 1), (4, 32, 4, 1), (4, 32, 4, 4), (8, 16, 4, 1))


def draw(rows: int, columns: int, seed: int, spread: int, block: tuple[int, int] = (1, 32)) -> tuple[Tensor, Tensor]:
    """Codes and scales on the CPU: all codes, scales over `spread` exponents below 2^10."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(138 - spread, 138, (-(-rows // block[0]), columns // 32), generator=generator, dtype=torch.uint8)
    return codes, scales


def operand(codes: Tensor, scales: Tensor, q: MXFP4, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    counter = torch.zeros(2, dtype=torch.int64, device="cuda")
    codes, scales = codes.cuda(), scales.cuda()
    return (*kernels.operand(codes, scales, fp8.top_scale(scales), q, dtype, counter), counter)


def operands() -> Iterator[dict[str, Any]]:
    for dtype in FORMATS:
        for block in ((1, 32), (32, 32)):
            q = MXFP4(block=block)
            for shape in SHAPES:
                for spread in (1, 12, 40, 137):
                    codes, scales = draw(*shape, seed=sum(shape), spread=spread, block=block)
                    if spread == 40 and scales.numel():
                        scales.view(-1)[0] = fp8.NAN_SCALE
                    got, factor, counter = operand(codes, scales, q, dtype)
                    want, want_factor, outside = fp8.operand(codes, scales, fp8.top_scale(scales), q, dtype)
                    nan = want.float().isnan()
                    same = torch.equal(got.cpu().view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])
                    same &= torch.equal(got.cpu().float().isnan(), nan) and torch.equal(factor.cpu(), want_factor)
                    counted = counter.tolist() == [int(outside), want.numel()]
                    case = {"format": str(dtype), "block": block, "shape": shape, "spread": spread, "outside": int(outside)}
                    yield {**case, "equal": same, "counted": counted}


def error(y: Tensor, a: Tensor, b: Tensor) -> float:
    """Largest error of y, FP32, over sum |a||b|, in units of 2^-24."""
    a, b = a.double(), b.double()
    bound = a.abs() @ b.abs().t()
    return float(((y.double() - a @ b.t()).abs() / bound.clamp(min=torch.finfo(torch.float64).tiny)).max()) * 2**24


def products() -> Iterator[dict[str, Any]]:
    q = MXFP4()
    for m, n, k in PRODUCTS:
        for data in ("gaussian", "spread", "short sums"):
            made = []
            for i, (rows, dtype) in enumerate(zip((m, n), fp8.FORMATS, strict=True)):
                if data != "short sums":
                    x = torch.randn(rows, k, device="cuda", generator=torch.Generator("cuda").manual_seed(i))
                    if data == "spread":  # 2^8 between blocks of K
                        x *= torch.exp2(torch.arange(k, device="cuda") // 32 % 9 - 4.0)
                    codes, scales, _ = quantize(x, q)
                else:  # multiples of 1/4 below 37: fewer than 2^12 of them sum exactly in 24 bits
                    codes, scales = (t.cuda() for t in draw(rows, k, i, 1))
                made.append((*operand(codes, scales, q, dtype), reference.decode(codes, scales, q, k, torch.bfloat16)))
            (a, a_factor, _, a_exact), (b, b_factor, _, b_exact) = made
            y = kernels.mm(a, b, a_factor, b_factor, None, None, torch.float32)
            z = torch.mm(a_exact, b_exact.t(), out_dtype=torch.float32)
            rounded = kernels.mm(a, b, a_factor, b_factor, None, None, torch.bfloat16)
            bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
            biased = kernels.mm(a, b, a_factor, b_factor, torch.tensor(1 / 9, device="cuda"), bias, torch.bfloat16)
            yield {
                "M, N, K": (m, n, k),
                "data": data,
                "FP8 error": error(y, a_exact, b_exact),
                "BF16 error": error(z, a_exact, b_exact),
                "FP8 equals BF16's FP32": torch.equal(y, z),
                "BF16 output is the FP32 one rounded": torch.equal(rounded, y.bfloat16()),
                "bias within a step": torch.allclose(biased.float(), y / 9 + bias.float(), rtol=2**-7, atol=1e-6),
            }


def speed() -> Iterator[dict[str, Any]]:
    for rows, columns in SIZES:
        rate = copy_rate((rows, columns))
        yield {"size": (rows, columns), "copy, TB/s": rate / 1e12}
        codes, scales, _ = quantize(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16), MXFP4())
        top = fp8.top_scale(scales)
        moved = rows * columns * (0.5 + 1 / 32 + 1)
        for dtype in FORMATS:
            spec = kernels.fp8_spec(MXFP4(), kernels.OUTPUT[dtype])
            y = torch.empty((rows, columns), dtype=torch.uint8, device="cuda")
            words = codes.view(-1).view(torch.int32).view(rows, -1)
            pointers = {
                "packed_ptr": words,
                "packed_stride": words.shape[1],
                "packed_scales_ptr": scales,
                "packed_scales_stride": scales.shape[1],
                "rows": rows,
                "columns": columns,
                "top_ptr": top,
                "y_ptr": y,
                "factor_ptr": torch.empty((), device="cuda"),
                "outside_ptr": torch.zeros(2, dtype=torch.int64, device="cuda"),
            }
            target = target_of(codes.device)
            usual = tile_of(spec, target)
            shares = {}
            for tile in dict.fromkeys((usual, *(Tile(*t) for t in TILES))):
                run = launcher(spec, target, words, columns, None, 0, 0, pointers, tile)
                shares[str((tile.rows, tile.units, tile.warps, tile.turns))] = moved / graph_seconds(run) / rate
            yield {"size": (rows, columns), "format": str(dtype), "share of copy, by tile, the usual first": shares}
        yield {"size": (rows, columns), "largest scale, us": graph_seconds(lambda s=scales: fp8.top_scale(s)) * 1e6}
    for m, n, k in GEMMS:
        a, b = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
        a8, b8, one = a.to(torch.float8_e5m2), b.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        runs: dict[str, Callable[[], Any]] = {
            "bf16": partial(torch.mm, a, b.t()),
            "bf16, FP32 out": partial(torch.mm, a, b.t(), out_dtype=torch.float32),
            "fp8": partial(kernels.mm, a8, b8, one, one, None, None, torch.bfloat16),
            "fp8, FP32 out": partial(kernels.mm, a8, b8, one, one, None, None, torch.float32),
        }
        yield {"M, N, K": (m, n, k), "TFLOP/s": {name: 2 * m * n * k / graph_seconds(run) / 1e12 for name, run in runs.items()}}


def main() -> None:
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"operands": operands, "products": products, "speed": speed}
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    for name in sys.argv[2:] or parts:
        result[name] = []
        for row in parts[name]():
            result[name].append(row)
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    made = result.get("operands", [])
    print(f"operands: {sum(r['equal'] and r['counted'] for r in made)} of {len(made)} equal")
    print(json.dumps({n: result[n] for n in ("products", "speed") if n in result}, indent=1))


if __name__ == "__main__":
    main()
