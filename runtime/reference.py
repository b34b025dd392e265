"""The oracle: amax, rotation, quantization, decoding and the GEMM, in plain ATen.

Every executor agrees with this module bit for bit. It is also what a CPU runs: the functions are traced into the graph and
fused by Inductor, so there is no data-dependent control flow, no in-place write, no constant tensor and no branch on a size.

Operands are 2-D, (R, C), with the contracted dimension last; strides are free. The arithmetic is FP32 on the value given.
Sums that precede a rounding decision are pairwise trees of a fixed shape. An executor must not contract a product and a sum
into a fused multiply-add.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4.runtime import cublas
from fp4.runtime.formats import E2M1_MAX, E4M3_HEADROOM_MAX, E4M3_MAX, FLT_MAX, QUEST_SIGMA, SCALE_FORMATS
from fp4.runtime.layout import Size, blocks, ceil_div, cut, materialize, pack, pad_to, unpack
from fp4.runtime.native import native_bytes
from fp4.runtime.rng import STREAM_SCALE, STREAM_SIGNS, halves, uniform, words
from fp4.runtime.rounding import (
    ELEMENT_MAX,
    bits,
    e8m0_inverse,
    e8m0_value,
    element_value,
    exmy_value,
    floats,
    nan_code,
    round_bf16,
    round_element,
    round_exmy,
)
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation, SpecError

# Added to the bits of a block's amax, these carry into the exponent where the rule rounds the scale up: from a significand of
# 1.75, of 1.8125, above 1.5 (E2M1's maximum is 1.5 * 2^2), above 1.75 (E4M3's and E5M2's are 1.75 * 2^8 and 1.75 * 2^15).
MX_CARRY = {"floor": 0, "range_fit": 0, "even": 0x200000, "uos": 0x180000, "ceil": 0x3FFFFF, "rceil": 0x1FFFFF}
# Sign, exponent and four bits of mantissa of an FP32.
POSTHOC_MASK = -0x80000
TOP_EXPONENT = {"e2m1": 2, "e4m3": 8, "e5m2": 15}

# (code values, codes, block scales, scale codes, tensor scale): two in blocks, two of (row blocks, column blocks), one 0-d.
Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def amax(x: Tensor) -> Tensor:
    """Largest finite magnitude of `x` (any shape), FP32, 0-d. 0 for an empty tensor; NaN and Inf are passed over."""
    a = x.float().abs()
    a = torch.where(a < torch.inf, a, 0.0)
    if statically_known_true(x.numel() > 0):
        return a.amax()
    return torch.nn.functional.pad(a.reshape(-1), (0, 1)).amax()


def signs(rotation: Rotation, seed: Tensor | None, site: int, device: torch.device) -> Tensor:
    """The diagonal of a rotation: (n,) FP32 of +-1. Fresh signs are the top bits of random words 0..n-1 of (seed, site)."""
    n = rotation.size
    if rotation.signs == "none":
        return torch.ones(n, dtype=torch.float32, device=device)
    if rotation.signs == "fresh":
        word = words(_need_seed(seed, rotation), site, (n,), STREAM_SIGNS, device)
        return 1.0 + 2.0 * (word >> 31).to(torch.float32)
    # Integers, not a tensor constant: a traced graph must not hold one. 32 signs an integer.
    index = torch.arange(n, dtype=torch.int64, device=device) % len(rotation.vector)
    mask = torch.zeros_like(index)
    for first in range(0, len(rotation.vector), 32):
        part = sum((v < 0) << i for i, v in enumerate(rotation.vector[first : first + 32]))
        mask = torch.where(index >= first, part, mask)
    return 1.0 - 2.0 * ((mask >> (index % 32)) & 1).to(torch.float32)


def rotate(x: Tensor, rotation: Rotation, seed: Tensor | None, site: int) -> Tensor:
    """x diag(signs) H_n / sqrt(n) along the last dimension, in blocks of n.

    x: (R, C), any float dtype. Returns (R, ceil(C/n)*n), BF16 if ``rotation.bf16`` else FP32; the padding takes part.
    Order: signs, butterfly stages 1, 2, 4, ... in FP32, one multiply by 1/sqrt(n), one rounding.
    """
    n = rotation.size
    y = pad_to(x.float(), 1, n).reshape(x.shape[0], ceil_div(x.shape[1], n), n)
    if rotation.signs != "none":
        y = y * signs(rotation, seed, site, x.device)
    y = _hadamard(y)
    return round_bf16(y).to(torch.bfloat16) if rotation.bf16 else y


def unrotate(y: Tensor, rotation: Rotation, seed: Tensor | None, site: int, columns: Size, dtype: torch.dtype) -> Tensor:
    """The inverse of `rotate`, y H_n diag(signs) / sqrt(n): (R, Cp) to (R, columns) of `dtype`, the padding cut off.

    y: Cp a multiple of n. Butterfly, multiply, signs in FP32, one rounding.
    """
    rows, groups, n = y.shape[0], y.shape[1] // rotation.size, rotation.size
    y = materialize(y)  # a GEMM's result: Inductor would drop its rounding to BF16, fusing it with the conversion back
    x = _hadamard(y.float().reshape(rows, groups, n)).reshape(rows, 1, groups, n)
    if rotation.signs != "none":
        x = x * signs(rotation, seed, site, y.device)
    return cut(x, rows, columns).to(dtype)


def _hadamard(y: Tensor) -> Tensor:
    """(R, C/n, n) FP32 times H_n / sqrt(n): (R, C)."""
    rows, groups, n = y.shape
    sign = 1.0 - 2.0 * torch.arange(2, dtype=torch.float32, device=y.device).reshape(2, 1)  # of a in a + b, of b in a - b
    for stage in range(n.bit_length() - 1):
        pairs = y.reshape(rows, groups, n // (2 << stage), 2, 1 << stage)
        y = pairs * sign + pairs.flip(3)
        if stage % 2 == 1:
            y = materialize(y)  # else each stage would repeat the one before at both elements of a pair
    return y.reshape(rows, groups * n) * (1.0 / math.sqrt(n))


def quantize(
    x: Tensor,
    q: Quantizer,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    site: int = 0,
    native_draws: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and tensor scale of an operand.

    x: (R, C), any float dtype. amax: FP32 0-d, the operand's amax where ``q.needs_amax``; computed when None. seed: one int64
    element, required where ``q.needs_seed``. native_draws: the stochastic rounding of an instruction (runtime/native.py).

    Returns codes uint8, (R, Cp/2) packed or (R, Cp) for 8-bit elements, with Cp = C padded to the block; scales, uint8
    (ceil(R/b0), Cp/b1) in ``q.scale_format``, or FP32 for FP8; tensor scale, FP32 0-d, the factor of the decoded value beyond
    code * scale; or outer scales, FP32 (R, ceil(C/outer)). A block with a NaN or Inf element has a NaN scale; its codes mean
    nothing.
    """
    _, _, codes, scales, tensor_scale = quantize_values(x, q, amax, seed, site, native_draws)
    return pack(codes) if q.packed else codes, scales, tensor_scale


def quantize_values(
    x: Tensor,
    q: Quantizer,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    site: int = 0,
    native_draws: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize` before packing: (values FP32 (R, Cp), scales FP32, codes uint8 (R, Cp), scales, tensor scale).

    ``decode_values(values, scales FP32)`` equals ``decode`` of the packed codes, bit for bit.
    """
    xb = blocks(x.float(), q.block)
    rows, columns = x.shape[0], xb.shape[2] * xb.shape[3]
    r = None
    if q.rounding == "stochastic":
        seed = _need_seed(seed, q)
        if native_draws:
            r = native_bytes(seed, site, x.shape[0], x.shape[1], x.device) << 14
        else:
            r = (halves(seed, site, x.shape, x.device) << 6) | 32
        r = blocks(r, q.block)
    largest = xb.abs().amax(dim=(1, 3))  # (row blocks, column blocks); NaN and Inf survive a maximum
    finite = largest < torch.inf
    block_max = torch.where(finite, largest, 0.0)
    tensor_scale = torch.ones((), dtype=torch.float32, device=x.device)
    if isinstance(q, NVFP4):
        tensor_max = _tensor_amax(x, amax) if q.needs_amax else tensor_scale
        if q.has_outer_scale:
            tensor_max = _groups_amax(xb, q.outer // q.block[1])
        if q.posthoc:
            v, code, s, scale_code, tensor_scale = _posthoc_eden(xb, block_max, q, _need_seed(seed, q), site)
        elif q.rounding == "ms_eden":
            v, code, s, scale_code, tensor_scale = _ms_eden(xb, block_max, tensor_max, q, _need_seed(seed, q), site)
        elif q.four_six:
            v, code, s, scale_code, tensor_scale = _four_six(xb, block_max, tensor_max, q)
        else:
            v, code, s, scale_code, tensor_scale = _nvfp4(xb, block_max, tensor_max, q, r)
        if q.has_outer_scale:  # one of each group
            tensor_scale = tensor_scale[:, :: q.outer // q.block[1]].contiguous()
    elif isinstance(q, FP8):
        s = _quotient(block_max, ELEMENT_MAX[q.format])
        s = torch.where(s > 0.0, s, 1.0)
        v, code = round_element(xb / _spread(s), q.format)
        s = torch.where(finite, s, torch.nan)
        return cut(v, rows, columns), s, cut(materialize(code), rows, columns), s, tensor_scale
    elif isinstance(q, MXFP4 | MXFP8):
        v, code, s, scale_code, tensor_scale = _mx(xb, block_max, q, r)
    else:
        raise SpecError(f"{q} has no arithmetic; write NVFP4, MXFP4, MXFP8 or FP8")
    scale_code = torch.where(finite, scale_code, nan_code(q.scale_format)).to(torch.uint8)
    s = torch.where(finite, s, torch.nan)
    return cut(v, rows, columns), s, cut(materialize(code), rows, columns), scale_code, tensor_scale


def decode_values(values: Tensor, scales: Tensor, q: Quantizer, columns: Size, dtype: torch.dtype) -> Tensor:
    """Code values (R, Cp) FP32 times block scales FP32: (R, columns) of `dtype`, the tensor scale left out.

    The product is formed in FP32 and rounded once; it is exact in BF16 where ``q.exact_in_bf16``.
    """
    return cut((blocks(values, q.block) * _spread(scales)).to(dtype), values.shape[0], columns)


def dequantize_values(
    values: Tensor, scales: Tensor, tensor_scale: Tensor, q: Quantizer, columns: Size, dtype: torch.dtype
) -> Tensor:
    """`decode_values` in FP32, times the tensor scale or the outer scales, rounded once to `dtype`: (R, columns)."""
    decoded = decode_values(values, scales, q, columns, torch.float32)
    if q.has_outer_scale:
        tensor_scale = _repeat(tensor_scale, q.outer, columns)
    return (decoded * tensor_scale).to(dtype)


def decode(codes: Tensor, scales: Tensor, q: Quantizer, columns: Size, dtype: torch.dtype) -> Tensor:
    """Code times block scale, the tensor scale left out: (R, columns) of `dtype`. codes, scales: as `quantize` returns them."""
    return decode_values(*_values(codes, scales, q), q, columns, dtype)


def dequantize(codes: Tensor, scales: Tensor, tensor_scale: Tensor, q: Quantizer, columns: Size, dtype: torch.dtype) -> Tensor:
    """code * block scale * tensor scale (or outer scales) in FP32, rounded once to `dtype`: (R, columns)."""
    return dequantize_values(*_values(codes, scales, q), tensor_scale, q, columns, dtype)


def _values(codes: Tensor, scales: Tensor, q: Quantizer) -> tuple[Tensor, Tensor]:
    """FP32 values of codes, (R, Cp), and of block scales."""
    values = element_value(unpack(codes) if q.packed else codes, q.element_dtype)
    return values, scales if q.scale_format == "fp32" else exmy_value(scales, q.scale_format)


def clip_mask(x: Tensor, scales: Tensor, q: Quantizer) -> Tensor:
    """One bit an element, 1 where the quantizer did not clip it: |x| < 6 * 2^E (Quartet 2505.14669); 0 where either is NaN.

    x: (R, C), the operand quantized. scales: uint8, its block scales. q: MXFP4 without prescale, else SpecError. Returns
    uint8 (R, Cp/8), Cp = C padded to the block; bit j of byte i is element 8i + j.
    """
    if not isinstance(q, MXFP4) or q.prescale != 1:
        raise SpecError(
            f"clip_mask: {q} is not MXFP4 of prescale 1, whose scale is the power of two compared with. Write MXFP4()"
        )
    xb = blocks(x.float(), q.block)
    columns = xb.shape[2] * xb.shape[3]
    code = scales.to(torch.int32)
    inverse = torch.where(code == nan_code("e8m0"), torch.nan, e8m0_inverse(code))
    kept = (xb * _spread(inverse)).abs() < E2M1_MAX
    bit = cut(materialize(kept.to(torch.int32)), x.shape[0], columns).reshape(x.shape[0], columns // 8, 8)
    byte = bit[..., 0]
    for j in range(1, 8):
        byte = byte | (bit[..., j] << j)
    return byte.to(torch.uint8)


def apply_mask(y: Tensor, mask: Tensor) -> Tensor:
    """y (R, C) where its bit of `mask`, uint8 (R, at least C/8), is 1, else 0."""
    shift = torch.arange(8, dtype=torch.int32, device=y.device)
    bit = cut((mask.to(torch.int32).reshape(mask.shape[0], 1, mask.shape[1], 1) >> shift) & 1, y.shape[0], y.shape[1])
    return torch.where(bit > 0, y, torch.zeros_like(y))


def mm(a: Tensor, b: Tensor, alpha: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a b^T * alpha + bias: products and sums in FP32, one rounding to `dtype`.

    a: (M, K), b: (N, K), any float dtype. alpha: FP32 0-d (the product of the tensor scales). bias: (N,). Returns (M, N).
    """
    if is_product(a, b, alpha, bias, dtype):
        return product(a, b, alpha)
    return scaled_sums(laid_out(a), laid_out(b), alpha, bias, dtype)


def scaled_sums(a: Tensor, b: Tensor, alpha: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`mm` by way of an FP32 result."""
    if a.device.type == "cuda" and a.dtype == b.dtype == torch.bfloat16:
        y = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:
        y = torch.mm(a.float(), b.float().t())
    if alpha is not None:
        y = y * alpha
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype)


def laid_out(x: Tensor) -> Tensor:
    """A library GEMM's order of additions follows the memory layout, so the layout is one of two: BF16 on a GPU may be the
    transpose of a contiguous matrix, W for dgrad, which a copy would cost a read and a write of W; else it is contiguous."""
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and x.t().is_contiguous():
        return x
    return x.contiguous()


def is_product(a: Tensor, b: Tensor, alpha: Any, bias: Any, dtype: torch.dtype) -> bool:
    """Is this `mm` one that cuBLAS rounds to BF16 itself?"""
    if a.device.type != "cuda" or {a.dtype, b.dtype, dtype} != {torch.bfloat16} or bias is not None:
        return False
    return alpha is None or cublas.available(a.device)


def product(a: Tensor, b: Tensor, alpha: Tensor | None = None) -> Tensor:
    """`mm` of BF16 (M, K) and (N, K) without bias, to BF16: sums in FP32, also those of parts of K."""
    a, b = laid_out(a), laid_out(b)
    if alpha is not None:
        scaled = None
        if a.numel() and b.numel() and is_product(a, b, alpha, None, torch.bfloat16):
            scaled = cublas.scaled_product(a, b, alpha)
        return scaled_sums(a, b, alpha, None, torch.bfloat16) if scaled is None else scaled
    if not is_product(a, b, None, None, torch.bfloat16):
        return torch.mm(a.float(), b.float().t()).to(torch.bfloat16)
    return plain_product(a, b)


def plain_product(a: Tensor, b: Tensor) -> Tensor:
    """`product` without a factor, by cuBLAS, which may not add parts of K in BF16. a, b: `laid_out`, on a CUDA device."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        return torch.mm(a, b.t())
    finally:
        matmul.allow_bf16_reduced_precision_reduction = allowed


def _need_seed(seed: Tensor | None, what: Quantizer | Rotation) -> Tensor:
    if seed is None:
        raise SpecError(f"{what} draws random numbers; pass seed, an int64 tensor of one element")
    return seed


def _tensor_amax(x: Tensor, given: Tensor | None) -> Tensor:
    return amax(x) if given is None else given.float().reshape(())


def _groups_amax(xb: Tensor, size: int) -> Tensor:
    """Largest finite magnitude of each `size` consecutive column blocks, for each of them: (row blocks, column blocks)."""
    a = xb.abs()
    largest = torch.where(a < torch.inf, a, 0.0).amax(dim=(1, 3))
    groups = ceil_div(largest.shape[1], size)
    return _repeat(pad_to(largest, 1, size).reshape(largest.shape[0], groups, size).amax(dim=2), size, largest.shape[1])


def _repeat(x: Tensor, times: int, columns: Size) -> Tensor:
    """Each column `times` times, cut to (R, columns)."""
    rows, groups = x.shape
    return cut(x.reshape(rows, 1, groups, 1).expand(rows, 1, groups, times), rows, columns)


def _constant(value: float, like: Tensor) -> Tensor:
    """FP32, 0-d. As a numerator it is divided: Python's ``3.0 / x`` is a product with the reciprocal, rounded twice."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _quotient(a: Tensor, value: float) -> Tensor:
    """a / value, rounded once, for a >= 0. Inductor and CUDA make a division by a constant a product with its reciprocal."""
    return a / torch.where(a < 0.0, a, value)


def _spread(s: Tensor) -> Tensor:
    """(row blocks, column blocks) -> (row blocks, 1, column blocks, 1), to broadcast over blocks."""
    return materialize(s).unsqueeze(1).unsqueeze(3)


def _tree_sum(x: Tensor, block: tuple[int, ...]) -> Tensor:
    """Sum over each block of (row blocks, b0, column blocks, b1), halving the columns and then the rows."""
    rows, columns = block
    x = materialize(x)
    while columns > 1:
        columns //= 2
        x = x[..., :columns] + x[..., columns:]
    while rows > 1:
        rows //= 2
        x = x[:, :rows] + x[:, rows:]
    return x[:, 0, :, 0]


def _nvfp4(xb: Tensor, block_max: Tensor, tensor_max: Tensor, q: NVFP4, r: Tensor | None) -> Parts:
    """NVFP4 with one block scale a block, nearest or stochastic elements (NVIDIA 2509.25149, appendix B)."""
    s_enc = torch.ones_like(tensor_max)
    if q.tensor_scale:
        range_max = min(E2M1_MAX * SCALE_FORMATS[q.scale][3], FLT_MAX)
        s_enc = torch.where(tensor_max > 0.0, (_constant(range_max, xb) / tensor_max).clamp(max=FLT_MAX), 1.0)
    t = block_max * (s_enc * (1.0 / q.factor))
    s, scale_code = round_exmy(t, q.scale)
    # Divisions, not reciprocal(): Triton's is approximate, and Inductor's setting for exact division leaves it so.
    tensor_scale = _constant(1.0, xb) / s_enc
    e = (_constant(1.0, xb) / (s * tensor_scale)).clamp(max=FLT_MAX)
    v, code = round_element(xb * _spread(e), "e2m1", r)
    return v, code, s, scale_code, tensor_scale


def _headroom_scale(tensor_max: Tensor, q: NVFP4, factor: float) -> Tensor:
    """amax / (factor * 256) for E4M3: the block scales stay under 4/7 of their maximum. 1 for a zero (or vanishing) amax."""
    if not q.tensor_scale:
        return torch.ones_like(tensor_max)
    top = SCALE_FORMATS[q.scale][3] * (E4M3_HEADROOM_MAX / E4M3_MAX)
    t = _quotient(tensor_max, min(factor * top, FLT_MAX))
    return torch.where(t > 0.0, t, 1.0)


def _divide(xb: Tensor, scale: Tensor) -> Tensor:
    """x / scale, block by block; zero with the sign of x where the block's scale is zero."""
    return torch.where(_spread(scale) > 0.0, xb / _spread(scale), xb * 0.0)


def _four_six(xb: Tensor, block_max: Tensor, tensor_max: Tensor, q: NVFP4) -> Parts:
    """Per block, the better of mapping the block's amax to 6 or to 4; a tie keeps 6 (Four Over Six 2512.02010)."""
    tensor_scale = _headroom_scale(tensor_max, q, float(E2M1_MAX))
    found = []
    for target in (6.0, 4.0):
        s, scale_code = round_exmy(block_max / (tensor_scale * target), q.scale)
        step = s * tensor_scale
        v, _ = round_element(_divide(xb, step), "e2m1")
        error = xb - v * _spread(step)
        found.append((s, scale_code, _tree_sum(error * error, q.block)))
    (s6, scale6, error6), (s4, scale4, error4) = found
    four = error4 < error6
    s, scale_code = torch.where(four, s4, s6), torch.where(four, scale4, scale6)
    v, code = round_element(_divide(xb, s * tensor_scale), "e2m1")
    return v, code, s, scale_code, tensor_scale


def _ms_eden(y: Tensor, block_max: Tensor, tensor_max: Tensor, q: NVFP4, seed: Tensor, site: int) -> Parts:
    """Nearest codes, and a block scale corrected by <y,y>/<y,yhat> and rounded stochastically (Quartet II 2601.22813)."""
    tensor_scale = _headroom_scale(tensor_max, q, q.factor)
    s, _ = round_exmy(block_max / (tensor_scale * q.factor), q.scale)
    step = s * tensor_scale
    v, code = round_element(_divide(y, step), "e2m1")
    correction = _correction(y, v, step, q)
    u = uniform(words(seed, site, s.shape, STREAM_SCALE, y.device, q.block[1]))
    s, scale_code = round_exmy(s * correction, q.scale, u)
    return v, code, s, scale_code, tensor_scale


def _correction(y: Tensor, v: Tensor, step: Tensor, q: NVFP4) -> Tensor:
    """<y,y>/<y,yhat> of each block, yhat being the elements v times the block's step."""
    projected = _tree_sum(y * v, q.block) * step
    correction = _tree_sum(y * y, q.block) / projected
    # Squares of tiny or huge values leave FP32's range; such a block keeps its scale, as one that decodes to zero does.
    return torch.where((projected > 0.0) & (correction < torch.inf), correction, 1.0)


def _posthoc_eden(y: Tensor, block_max: Tensor, q: NVFP4, seed: Tensor, site: int) -> Parts:
    """`_ms_eden` whose tensor scale follows from the corrected block scales, so that the operand is read once.

    Post hoc range alignment, as Quartet II's kernels do it (2601.22813): codes by a provisional scale p of each block, amax /
    factor with four bits of mantissa, the rest cut off; p times the correction kept in FP32 (BF16 there); tensor scale = the
    largest of those / 256; then each over it, rounded stochastically to E4M3. The same sites and words as `_ms_eden`.
    """
    p = floats(bits(_quotient(block_max, q.factor)) & POSTHOC_MASK)
    v, code = round_element(_divide(y, p), "e2m1")
    wide = p * _correction(y, v, p, q)
    tensor_scale = amax(wide) * (1.0 / E4M3_HEADROOM_MAX)
    tensor_scale = torch.where(tensor_scale > 0.0, tensor_scale, 1.0)
    u = uniform(words(seed, site, wide.shape, STREAM_SCALE, y.device, q.block[1]))
    s, scale_code = round_exmy(wide / tensor_scale, q.scale, u)
    return v, code, s, scale_code, tensor_scale


def _mx(xb: Tensor, block_max: Tensor, q: MXFP4 | MXFP8, r: Tensor | None) -> Parts:
    """Power of two block scales (OCP Microscaling 1.0 and the rules of MXFP4.scale_rule, MXFP8.scale_rule)."""
    # The exponent is that of the block before the prescale, so that 3/4 keeps a maximum below 8 * 2^E within 6 * 2^E.
    scale_code = _mx_scale(xb, block_max, q)
    factor = q.stretch
    tensor_scale = _constant(1.0 / factor, xb)
    scaled = xb * _spread(e8m0_inverse(scale_code))
    if factor != 1.0:
        scaled = scaled * factor
    v, code = round_element(scaled, q.element_dtype, r)
    return v, code, e8m0_value(scale_code), scale_code, tensor_scale


def _mx_scale(xb: Tensor, block_max: Tensor, q: MXFP4 | MXFP8) -> Tensor:
    """Biased exponents, int32 0..254, from the bits of the float: its logarithm would round. 0 for a zero block."""
    if q.scale_rule == "quest":
        size = q.block[0] * q.block[1]
        finite = torch.where(xb.abs() < torch.inf, xb, 0.0)
        centred = finite - _spread(_tree_sum(finite, q.block) * (1.0 / size))
        sigma = (_tree_sum(centred * centred, q.block) * (1.0 / size)).sqrt()
        field = (bits(sigma * (QUEST_SIGMA / E2M1_MAX) + 1e-8) >> 23) & 0xFF  # a NaN of overflowed sums may have the sign bit
        return torch.where(block_max > 0.0, field.clamp(max=254), 0)
    top = 0 if q.scale_rule == "range_fit" else TOP_EXPONENT[q.element_dtype]
    return (((bits(block_max) + MX_CARRY[q.scale_rule]) >> 23) - top).clamp(min=0, max=254)
