"""On a CUDA GPU: the block-scaled matmul kernels against the oracle's GEMM, each tile, and their time.

    python -m benchmarks.gpu_scaled_mm RESULT.json

On Hopper the MX formats alone, which Triton decodes in the kernel and multiplies in BF16: a check of layouts and epilogues on
hardware, not of speed. On Blackwell every pair of formats, and the library's products beside them. Equal where FP32 sums are
exact; else the largest error over the bound of FP32 sums in any order, which must be at most 1 (the library rounds MXFP4's to
BF16, so there it is more).
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from fp4.kernels import matmul_library as library
from fp4.kernels.matmul import scaled_mm
from fp4.kernels.matmul_spec import FORMATS, MatmulSpec, format_of, tiles
from fp4.kernels.target import target_of
from fp4.runtime import reference
from fp4.runtime.layout import swizzle
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4, Quantizer

PAIRS: tuple[tuple[Quantizer, Quantizer], ...] = (
    (NVFP4(), NVFP4()),
    (MXFP4(), MXFP4()),
    (MXFP8(), MXFP8()),
    (MXFP8(), MXFP8(format="e5m2")),
    (MXFP8(), MXFP4()),
)
SHAPES = ((1, 1, 32), (130, 140, 200), (257, 3, 48), (5, 300, 16), (1000, 777, 4096), (4096, 4096, 4096))
TIMED = (16384, 4096, 4096)
NARROW = {"e2m1": (0, 256), "e4m3": (0x30, 0x40), "e5m2": (0x38, 0x40)}
NARROW_SCALES = {"e4m3": (0x38, 0x40), "e8m0": (126, 128)}
U = 2.0**-23  # twice FP32's half step: tensor cores may truncate


def narrow(rows: int, k: int, q: Quantizer, seed: int) -> tuple[Tensor, Tensor]:
    """Random codes and scales of few binades, whose sums of products are exact in FP32 for a few hundred of them."""
    form = FORMATS[str(format_of(q))]
    blocks = -(-k // form.block)
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(span: tuple[int, int], columns: int) -> Tensor:
        return torch.randint(*span, (rows, columns), dtype=torch.uint8, device="cuda", generator=generator)

    return draw(NARROW[form.element], blocks * form.block // form.per_byte), draw(NARROW_SCALES[form.scale], blocks)


def decoded(codes: Tensor, scales: Tensor, q: Quantizer) -> Tensor:
    return reference.decode(codes, scales, q, codes.shape[1] * FORMATS[str(format_of(q))].per_byte, torch.float64)


def check(qa: Quantizer, qb: Quantizer, multiply: Callable[..., Tensor]) -> dict[str, Any]:
    """multiply(a, its scales, b, its scales, alphas, dtype)."""
    unequal, worst = [], 0.0
    for m, n, k in SHAPES:
        if k <= 256:
            (a, sa), (b, sb) = narrow(m, k, qa, 1), narrow(n, k, qb, 2)
            got = multiply(a, swizzle(sa), b, swizzle(sb), [], torch.float32)
            if not torch.equal(got.double(), decoded(a, sa, qa) @ decoded(b, sb, qb).t()):
                unequal.append([m, n, k])
        generator = torch.Generator(device="cuda").manual_seed(3)
        x, w = (torch.randn(r, k, device="cuda", generator=generator) for r in (m, n))
        (a, sa, ta), (b, sb, tb) = reference.quantize(x, qa), reference.quantize(w, qb)
        got = multiply(a, swizzle(sa), b, swizzle(sb), [ta, tb], torch.float32).double()
        left, right, alpha = decoded(a, sa, qa), decoded(b, sb, qb), ta.double() * tb.double()
        bound = (k * U / (1 - k * U) + 2 * U) * (left.abs() @ right.abs().t()) * alpha
        worst = max(worst, ((got - left @ right.t() * alpha).abs() / bound.clamp(min=1e-300)).max().item())
    return {"unequal where exact": unequal, "largest error over the bound": worst}


def pair(qa: Quantizer, qb: Quantizer) -> list[dict[str, Any]]:
    names = str(format_of(qa)), str(format_of(qb))
    target = target_of(torch.device("cuda"))
    m, n, k = TIMED
    (a, sa), (b, sb) = narrow(m, k, qa, 1), narrow(n, k, qb, 2)
    given = a, swizzle(sa), b, swizzle(sb)
    ways: dict[str, Callable[..., Tensor]] = {}
    for tile in tiles(MatmulSpec(*names), target):
        ways[str(tile)] = lambda a, sa, b, sb, alphas, dtype, tile=tile: scaled_mm(
            a, sa, b, sb, *names, alphas=alphas, dtype=dtype, tile=tile
        )
    if target.capability >= 100 and not library.no_product(qa, qb):
        ways["library"] = lambda a, sa, b, sb, alphas, dtype: (
            library.scaled_mm(
                a, sa, b, sb, names, tuple(alphas) if alphas and names[0] == "nvfp4" else (None, None), None, dtype
            )
            if library.fits(a, b)
            else scaled_mm(a, sa, b, sb, *names, alphas=alphas, dtype=dtype)
        )
    rows = []
    for name, way in ways.items():
        row: dict[str, Any] = {"a": str(qa), "b": str(qb), "way": name}
        try:
            row |= check(qa, qb, way)
            ms = triton.testing.do_bench(lambda way=way: way(*given, [], torch.bfloat16))
            row |= {"ms": ms, "TFLOP/s": 2e-9 * m * n * k / ms}
        except Exception as error:  # one kernel's failure must not lose the others' figures
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows.append(row)
    return rows


def main() -> None:
    x, w = (torch.randn(r, TIMED[2], device="cuda", dtype=torch.bfloat16) for r in TIMED[:2])
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "M, N, K timed": TIMED,
        "BF16 mm, ms": triton.testing.do_bench(lambda: x @ w.t()),
        "kernels": [],
    }
    for qa, qb in PAIRS:
        result["kernels"] += pair(qa, qb)
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
