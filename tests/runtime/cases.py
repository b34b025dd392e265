"""Inputs and quantizers that every executor is tried on, and the comparison with the numpy oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fp4.runtime import reference
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer
from tests.runtime import oracle_numpy as oracle

FLT_MAX = torch.finfo(torch.float32).max

NVFP4_CASES: tuple[Quantizer, ...] = (
    NVFP4(),
    NVFP4(block=(16, 16)),
    NVFP4(block=(1, 32)),
    NVFP4(tensor_scale=False),
    NVFP4(range_guard=True),
    NVFP4(rounding="stochastic"),
    NVFP4(rounding="stochastic", range_guard=True),
    NVFP4(rounding="stochastic", block=(16, 16)),
    NVFP4(four_six=True),
    NVFP4(four_six=True, block=(16, 16)),
    NVFP4(rounding="ms_eden"),
    NVFP4(rounding="ms_eden", posthoc=True),
    NVFP4(outer=128),
    NVFP4(outer=128, rounding="stochastic"),
    NVFP4(outer=48, rounding="stochastic", range_guard=True),
)
SCALE_FORMAT_CASES: tuple[Quantizer, ...] = tuple(
    NVFP4(scale=scale, tensor_scale=tensor_scale)
    for scale in ("e1m6", "e2m5", "e3m4", "e5m2", "e6m1", "ue5m3", "e8m0")
    for tensor_scale in (True, False)
    if not (scale == "e8m0" and tensor_scale)
)
MX_CASES: tuple[Quantizer, ...] = (
    *(MXFP4(scale_rule=rule) for rule in ("floor", "even", "uos", "ceil", "quest", "range_fit")),
    MXFP4(block=(32, 32)),
    MXFP4(scale_rule="ceil", rounding="stochastic"),
    MXFP4(scale_rule="range_fit", rounding="stochastic"),
    MXFP4(prescale=0.75, rounding="stochastic"),
    MXFP4(rounding="stochastic", allow_clipping=True),
    MXFP8(),
    MXFP8(format="e5m2"),
    MXFP8(scale_rule="floor"),
    MXFP8(scale_rule="floor", format="e5m2"),
    MXFP8(block=(32, 32)),
)
FP8_CASES: tuple[Quantizer, ...] = (FP8(), FP8(block=(128, 128)), FP8(block=(1, 32)), FP8(format="e5m2"))
QUANTIZERS = NVFP4_CASES + SCALE_FORMAT_CASES + MX_CASES + FP8_CASES

SHAPES = ((1, 16), (3, 40), (15, 48), (17, 33), (129, 257), (0, 32), (2, 0), (1, 1))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _outliers() -> torch.Tensor:
    x = gaussian(40, 160, seed=1)
    return torch.where(gaussian(40, 160, seed=2) > 2.5, x * 100, x)


def _quarter_grid() -> torch.Tensor:
    """Multiples of 1/4 in BF16: quotients fall on midpoints, where the order of roundings shows."""
    return torch.randint(-32, 33, (64, 256), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16) / 4


def _midpoints() -> torch.Tensor:
    """Each block holds its maximum 6 and every midpoint, the FP32 neighbours of each, with both signs, times 2^k."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([torch.nextafter(middle, torch.tensor(0.0)), middle, torch.nextafter(middle, torch.tensor(9.0))])
    near = torch.cat([near, -near, torch.tensor([0.0, -0.0])])
    rows = near.repeat(16).reshape(64, 11)
    x = torch.nn.functional.pad(rows, (0, 5))
    x[:, 11] = 6.0
    return torch.cat([x * 2.0**k for k in (-3, 0, 4)], 1).repeat(1, 3)


def _denormals() -> torch.Tensor:
    bits = torch.randint(0, 2**23, (20, 96), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    x = bits.view(torch.float32)
    x[3, :32] = 0
    x[4] = 0
    x[5] = -x[5]
    return x


def _tiny_denormals() -> torch.Tensor:
    return torch.randint(-9, 10, (5, 64), generator=torch.Generator().manual_seed(5), dtype=torch.int32).float() * 1.4e-45


def _huge() -> torch.Tensor:
    x = gaussian(20, 96, seed=6).clamp(-3, 3) * (FLT_MAX / 3)
    x[0, 0], x[1, 1] = FLT_MAX, -FLT_MAX
    x[2, :32] = 0
    return x


def _zero_parts() -> torch.Tensor:
    x = gaussian(20, 320, seed=7)
    x[3] = 0
    x[:, 128:256] = -0.0
    return x


def _poisoned() -> torch.Tensor:
    x = gaussian(40, 320, seed=8)
    x[2, 5], x[2, 200], x[9, 33] = float("nan"), float("inf"), -float("inf")
    return x


def _wide() -> torch.Tensor:
    """Blocks 2^-4 ... 2^-24 below the tensor's amax, of 128 columns each."""
    return gaussian(17, 128 * 6, seed=9) * torch.exp2(-4.0 * torch.arange(6).repeat_interleave(128))


DATA: dict[str, Callable[[], torch.Tensor]] = {
    "gaussian": lambda: gaussian(48, 288),
    "outliers": _outliers,
    "quarter_grid": _quarter_grid,
    "midpoints": _midpoints,
    "denormals": _denormals,
    "tiny_denormals": _tiny_denormals,
    "huge": _huge,
    "zero": lambda: torch.zeros(17, 64),
    "negative_zero": lambda: -torch.zeros(3, 64),
    "zero_parts": _zero_parts,
    "poisoned": _poisoned,
    "all_nan": lambda: torch.full((2, 64), float("nan")),
    "wide": _wide,
    "gradient": lambda: gaussian(16, 64, seed=10) * 1e-9,
    "float16": lambda: gaussian(16, 64, seed=11).to(torch.float16),
    "bfloat16": lambda: gaussian(16, 64, seed=12).to(torch.bfloat16),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits; two NaN count as equal whatever their payload."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(whole) == b.contiguous().view(whole)
    return bool((equal | (a.isnan() & b.isnan())).all())


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """One code a byte, from two."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)


def check_against_oracle(x: torch.Tensor, q: Quantizer, amax: torch.Tensor | None = None, seed: int = 0, site: int = 0) -> None:
    """quantize, decode and dequantize of `x` are the numpy oracle's, bit for bit (codes where the block is finite)."""
    got_codes, got_scales, got_tensor_scale = reference.quantize(x, q, amax, torch.tensor([seed]), site)
    columns = x.shape[1]
    expected = oracle.quantize(x.float().numpy(), q, None if amax is None else float(amax), seed, site)
    live = torch.from_numpy(~expected.spread(expected.poisoned))

    assert got_codes.dtype == torch.uint8
    assert got_codes.is_contiguous()
    codes = unpack(got_codes) if q.packed else got_codes
    assert codes.shape == expected.codes.shape
    assert torch.equal(codes[live], torch.from_numpy(expected.codes)[live])

    scales = expected.scales if expected.scale_bytes is None else expected.scale_bytes
    assert got_scales.is_contiguous()
    assert same_bits(got_scales, torch.from_numpy(np.ascontiguousarray(scales)))
    assert got_tensor_scale.shape == ((x.shape[0], -(-columns // q.outer)) if q.has_outer_scale else ())
    assert got_tensor_scale.is_contiguous()
    assert same_bits(got_tensor_scale, torch.from_numpy(np.asarray(expected.tensor_scale)))

    decoded = reference.decode(got_codes, got_scales, q, columns, torch.float32)
    assert same_bits(decoded, torch.from_numpy(expected.decode(columns)))
    value = reference.dequantize(got_codes, got_scales, got_tensor_scale, q, columns, torch.float32)
    assert same_bits(value, torch.from_numpy(expected.dequantize(columns)))

    values, scales_f32, codes_again, scales_again, _ = reference.quantize_values(x, q, amax, torch.tensor([seed]), site)
    assert torch.equal(codes_again, codes)
    assert same_bits(scales_again, got_scales)
    assert same_bits(reference.decode_values(values, scales_f32, q, columns, torch.float32), decoded)
    for dtype in (torch.float32, torch.bfloat16):
        once = reference.dequantize(got_codes, got_scales, got_tensor_scale, q, columns, dtype)
        again = reference.dequantize_values(values, scales_f32, got_tensor_scale, q, columns, dtype)
        assert same_bits(again, once)
        assert same_bits(once, value.to(dtype))


def quantized_linear(x: torch.Tensor, w: torch.Tensor, q: Quantizer, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x w^T with both operands quantized: decoded, multiplied, then the tensor scales as an epilogue factor. FP32.

    Outer scales vary along the sum, so they are part of the decoded operands.
    """
    operands, factor = [], torch.tensor(1.0)
    for v in (x, w):
        codes, scales, tensor_scale = reference.quantize(v, q, None, torch.tensor([0]))
        if q.has_outer_scale:
            operands.append(reference.dequantize(codes, scales, tensor_scale, q, v.shape[1], torch.float32))
        else:
            operands.append(reference.decode(codes, scales, q, v.shape[1], torch.float32))
            factor = factor * tensor_scale
    return reference.mm(operands[0], operands[1], factor, bias, torch.float32)
