"""Rounding to narrow floating point formats, in FP32 and int32 arithmetic whose result no fusion or reordering can change.

A format is (exponent bits, mantissa bits, bias, max). Between two powers of two its values are an integer grid, so rounding
is: multiply by a power of two (exact), round to an integer, and read value and code from that integer. Subnormals are the
same grid as the first binade. Inputs are finite and not negative unless stated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4.runtime.formats import E2M1_MAX, E4M3_MAX, E5M2_MAX, SCALE_FORMATS

# Signed 8-bit elements: the scale formats of the same name, plus a sign in the top bit.
ELEMENT_MAX = {"e2m1": float(E2M1_MAX), "e4m3": float(E4M3_MAX), "e5m2": float(E5M2_MAX)}
E8M0_NAN = 255
# 2^-127, the value of E8M0 byte 0, is a denormal float.
MIN_E8M0_BITS = 0x00400000


def bits(x: Tensor) -> Tensor:
    """The bits of an FP32 tensor, int32."""
    return x.view(torch.int32)


def floats(x: Tensor) -> Tensor:
    """The FP32 tensor with these int32 bits."""
    return x.view(torch.float32)


def clip(a: Tensor, top: float) -> Tensor:
    """min(a, top), and `top` for NaN, whose conversion to an integer would be undefined."""
    return torch.where(a < top, a, top)


def round_integer(t: Tensor, u: Tensor | None) -> Tensor:
    """Round to an integer: half to even, or up with probability frac(t) when `u` (FP32 in [0, 1)) is given."""
    if u is None:
        return torch.round(t)
    low = torch.floor(t)
    return low + (u < t - low).to(torch.float32)


def round_bf16(x: Tensor) -> Tensor:
    """FP32 rounded to the nearest BF16, still FP32. Inductor drops a cast to BF16 and back; it cannot drop this."""
    i = bits(x)
    rounded = floats((i + 0x7FFF + ((i >> 16) & 1)) & -0x10000)
    return torch.where(x.abs() < torch.inf, rounded, x)


def round_e2m1(a: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
    """Magnitudes (FP32) to E2M1: (value FP32, code FP32 in 0..7). Saturates at 6, NaN included.

    Half to even; or stochastic, where `r` (int32 below 2^22) is given: with f the fraction of the step in 2^-22nds, up where
    r + f >= 2^22. (Below 1 the magnitude is first rounded to a multiple of 2^-23.)
    """
    a = clip(a, float(E2M1_MAX))
    if r is not None:
        # Below 1 the step is that of [1, 2): there 1 is added. Then the step is 2^22 of the last place in every binade: r goes
        # below it, the carry rounds up, into the exponent too.
        below = (a < 1.0).to(torch.float32)
        i = bits(a + below) + r
        return floats(i & -0x400000) - below, (i >> 22).to(torch.float32) - 252.0 - 2.0 * below
    below2, below4 = a < 2.0, a < 4.0
    n = torch.round(torch.where(below2, a * 2.0, torch.where(below4, a, a * 0.5)))
    value = torch.where(below2, n * 0.5, torch.where(below4, n, n * 2.0))
    return value, torch.where(below2, n, torch.where(below4, n + 2.0, n + 4.0))


def round_exmy(a: Tensor, name: str, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Magnitudes (FP32) to an unsigned ExMy format of SCALE_FORMATS: (value FP32, code int32). Saturates, NaN included."""
    _, mantissa, bias, top = SCALE_FORMATS[name]
    a = clip(a, top)
    if name == "e8m0":
        return _round_e8m0(a)
    first = (128 - bias) << 23  # bits of the smallest normal value: its binade and the subnormals share one grid
    binade = (bits(a) & 0x7F800000).clamp(min=first)
    n = round_integer(a * floats((254 << 23) + (mantissa << 23) - binade), u)
    return n * floats(binade - (mantissa << 23)), (((binade - first) >> 23) << mantissa) + n.to(torch.int32)


def _round_e8m0(a: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest power of two, 1.5 goes up. Zero and anything up to 2^-127 is byte 0, which is 2^-127: E8M0 has no zero."""
    i = bits(a)
    code = torch.where(i < 0x00800000, (i >= 0x00600000).to(torch.int32), (i + 0x00400000) >> 23).clamp(max=254)
    return e8m0_value(code), code


def e8m0_value(code: Tensor) -> Tensor:
    """2^(code - 127) of int32 codes 0..254, FP32."""
    return floats((code << 23).clamp(min=MIN_E8M0_BITS))


def e8m0_inverse(code: Tensor) -> Tensor:
    """2^(127 - code) of int32 codes 0..254, FP32."""
    return floats(((254 - code) << 23).clamp(min=MIN_E8M0_BITS))


def nan_code(name: str) -> int:
    """The byte that means NaN in a scale format: all of its bits set."""
    exponent, mantissa, _, _ = SCALE_FORMATS[name]
    return (1 << (exponent + mantissa)) - 1


def exmy_value(code: Tensor, name: str) -> Tensor:
    """Codes (uint8 or int32) of an unsigned ExMy format to FP32; the NaN code to NaN."""
    _, mantissa, bias, _ = SCALE_FORMATS[name]
    i = code.to(torch.int32)
    if name == "e8m0":
        value = e8m0_value(i)
    else:
        normal = floats((i << (23 - mantissa)) + ((127 - bias) << 23))
        value = torch.where(i < (1 << mantissa), i.to(torch.float32) * 2.0 ** (1 - bias - mantissa), normal)
    return torch.where(i == nan_code(name), torch.nan, value)


def round_element(x: Tensor, element: str, r: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Signed values (FP32) to e2m1, e4m3 or e5m2: (value FP32, code uint8). The sign bit is that of x, -0.0 included.

    r: for stochastic rounding to e2m1, see `round_e2m1`.
    """
    negative = bits(x) < 0
    if element == "e2m1":
        value, magnitude = round_e2m1(x.abs(), r)
        code = torch.where(negative, magnitude + 8.0, magnitude)
    else:
        value, whole = round_exmy(x.abs(), element)
        code = torch.where(negative, whole + 0x80, whole)
    return torch.where(negative, -value, value), code.to(torch.uint8)


def element_value(code: Tensor, element: str) -> Tensor:
    """Codes (uint8, one a byte) of e2m1, e4m3 or e5m2 elements to FP32."""
    # Comparisons in the type of the result: Inductor's conversion of a uint8 mask to a float mask is slow.
    if element == "e2m1":
        c = code.to(torch.float32)
        m = torch.where(c < 8.0, c, c - 8.0)
        value = torch.where(m < 4.0, m * 0.5, torch.where(m < 6.0, m - 2.0, m * 2.0 - 8.0))
        return torch.where(c < 8.0, value, -value)
    i = code.to(torch.int32)
    value = exmy_value(i & 0x7F, element)
    return torch.where(i < 0x80, value, -value)
