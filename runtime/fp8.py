"""MXFP4 operands as FP8 tensors, for tensor cores that multiply FP8 and not FP4 (Ada, Hopper).

An E2M1 value times 2^E is a number of E5M2 for 29 exponents E, and of E4M3 for 15. A power of two for the whole tensor moves
its largest block to the top of that reach, and goes into the GEMM's scale. Only blocks far below the largest one leave the
reach, and their elements are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4.runtime import reference
from fp4.runtime.formats import SCALE_FORMATS
from fp4.runtime.layout import unpack
from fp4.runtime.rounding import exmy_value
from fp4.runtime.spec import MXFP4, Quantizer

NAN_SCALE = 255


@dataclass(frozen=True)
class Reach:
    """Exponents E for which every E2M1 value times 2^E is a number of the format."""

    dtype: torch.dtype
    least: int
    most: int


REACH = {
    torch.float8_e5m2: Reach(torch.float8_e5m2, -15, 13),
    torch.float8_e4m3fn: Reach(torch.float8_e4m3fn, -8, 6),
}
# The first operand of a GEMM, X or dY, spreads wider than the second, W or X; cuBLAS has no product of two E5M2 tensors.
FORMATS = (torch.float8_e5m2, torch.float8_e4m3fn)


def inexact(first: Quantizer | None, second: Quantizer | None) -> str:
    """Why operands of these quantizers are not exact in FP8; empty where they are."""
    for q in (first, second):
        if not isinstance(q, MXFP4):
            return "an operand that is not quantized is not FP8" if q is None else f"{q} is not exact in FP8, MXFP4 is"
    return ""


def top_scale(scales: Tensor) -> Tensor:
    """The largest E8M0 code of finite blocks: int32, 0-d; 0 of no blocks."""
    if scales.numel() == 0:
        return torch.zeros((), dtype=torch.int32, device=scales.device)
    return torch.where(scales == NAN_SCALE, 0, scales).amax().to(torch.int32)


def operand(codes: Tensor, scales: Tensor, top: Tensor, q: Quantizer, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values, the factor that the values are to be multiplied by, and the count of elements outside the reach.

    codes: uint8 (R, Cp/2), scales: uint8 (R or R/32, Cp/32), of MXFP4 `q`. top: what `top_scale` of the scales gives; of a
    larger tensor, more of the reach is left unused. dtype: float8_e5m2 or float8_e4m3fn. Returns (R, Cp) of `dtype`; FP32, 0-d,
    a power of two; int64, 0-d, the nonzero elements of blocks below the reach, which FP8 rounds or flushes to zero. Blocks of a
    NaN scale are NaN.
    """
    reach = REACH[dtype]
    bias = SCALE_FORMATS["e8m0"][2]
    top = torch.clamp(top, min=reach.most + 1)  # so that the factor is a normal number
    exponents = scales.to(torch.int32) - top + reach.most
    exact = torch.where(scales == NAN_SCALE, NAN_SCALE, torch.clamp(exponents + bias, min=0)).to(torch.uint8)
    width = 2 * codes.shape[1]
    values = reference.decode(codes, exact, q, width, torch.float32).to(dtype)
    below = (exponents < reach.least).repeat_interleave(q.block[0], 0).repeat_interleave(q.block[1], 1)
    outside = (below[: codes.shape[0]] & ((unpack(codes) & 7) != 0)).sum()
    return values, exmy_value((top - reach.most).to(torch.uint8), "e8m0"), outside


def mm(
    a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, alpha: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """a b^T * a_factor * b_factor * alpha + bias: products and sums in FP32, one rounding to `dtype`.

    a: (M, K), b: (N, K) FP8; the factors FP32, 0-d; alpha and bias as ``reference.mm``. Returns (M, N).
    """
    factor = a_factor * b_factor if alpha is None else a_factor * b_factor * alpha
    return reference.mm(a.float(), b.float(), factor, bias, dtype)
