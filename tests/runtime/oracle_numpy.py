"""A second oracle, in numpy and ml_dtypes, written from the definition of the formats and not from `fp4.runtime`.

Rounding is a search in the table of representable values (here), where the product works on bits; block maxima, exponents and
random words are computed by other means as well. What the two must share is the order of the FP32 operations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
FLT_MAX = np.finfo(np.float32).max
f32 = np.float32

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
# (exponent bits, mantissa bits) of the unsigned formats that ml_dtypes does not have. All-ones is NaN, no infinity.
EXMY = {"e1m6": (1, 6), "e2m5": (2, 5), "e3m4": (3, 4), "e6m1": (6, 1), "ue5m3": (5, 3)}
NAN_BYTE = {"e4m3": 0x7F, "e5m2": 0x7F, "e8m0": 0xFF, "e1m6": 0x7F, "e2m5": 0x7F, "e3m4": 0x7F, "e6m1": 0x7F, "ue5m3": 0xFF}


@functools.cache
def table(fmt: str) -> F64:
    """The finite non-negative values of `fmt`, ascending; the index is the code."""
    if fmt in EXMY:
        exponent_bits, mantissa_bits = EXMY[fmt]
        bias = 2 ** (exponent_bits - 1) - 1
        codes = np.arange(2 ** (exponent_bits + mantissa_bits) - 1)
        field, mantissa = codes >> mantissa_bits, codes % 2**mantissa_bits / 2**mantissa_bits
        return np.where(field == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, field - bias))
    last = {"e2m1": 7, "e4m3": 0x7E, "e5m2": 0x7B, "e8m0": 0xFE}[fmt]
    return np.arange(last + 1, dtype=np.uint8).view(ML_DTYPES[fmt]).astype(np.float64)


def floor_code(magnitude: npt.ArrayLike, fmt: str) -> npt.NDArray[np.int64]:
    """Code of the largest value not above `magnitude`; 0 below the smallest."""
    return np.clip(np.searchsorted(table(fmt), np.asarray(magnitude, np.float64), side="right") - 1, 0, None)


def nearest_code(magnitude: npt.ArrayLike, fmt: str) -> npt.NDArray[np.int64]:
    """Code of the nearest value, saturating; a tie takes the even code, in e8m0 (no even digit exists) the larger value."""
    values, m = table(fmt), np.asarray(magnitude, np.float64)
    low = floor_code(m, fmt)
    high = np.minimum(low + 1, len(values) - 1)
    middle = (values[low] + values[high]) / 2
    tie_up = np.ones_like(low, bool) if fmt == "e8m0" else low % 2 == 1
    return np.where((m > middle) | ((m == middle) & tie_up), high, low)


def stochastic_code(magnitude: npt.ArrayLike, fmt: str, u: F32) -> npt.NDArray[np.int64]:
    """Up with probability (m - low) / (high - low), saturating."""
    values, m = table(fmt), np.minimum(np.asarray(magnitude, np.float64), table(fmt)[-1])
    low = floor_code(m, fmt)
    high = np.minimum(low + 1, len(values) - 1)
    gap = np.where(high > low, values[high] - values[low], 1.0)
    return np.where(u < (m - values[low]) / gap, high, low)


def e2m1_stochastic_code(magnitude: F32, draw: I64) -> npt.NDArray[np.int64]:
    """Up where the draw, below 2^16, and the fraction of the step in 2^-16ths, rounded half up, make 2^16. Saturating."""
    values = table("e2m1")
    below = magnitude < 1
    m = np.minimum(np.where(below, (magnitude + f32(1)).astype(np.float32) - f32(1), magnitude).astype(np.float64), values[-1])
    low = floor_code(m, "e2m1")
    high = np.minimum(low + 1, len(values) - 1)
    gap = np.where(high > low, values[high] - values[low], 1.0)
    return np.where(np.floor((m - values[low]) / gap * 65536 + 0.5) + draw >= 65536, high, low)


def element_code(x: F32, fmt: str, draw: I64 | None = None) -> U8:
    """Signed code of every element; `draw` given: stochastic rounding to E2M1."""
    magnitude = np.abs(x)
    code = nearest_code(magnitude, fmt) if draw is None else e2m1_stochastic_code(magnitude, draw)
    sign_bit = {"e2m1": 8}.get(fmt, 128)
    return (code + np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def philox(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., SC 2011): (..., 4) counter words to (..., 4) random words, all below 2^32."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counter[..., i] for i in range(4)]
    k0, k1 = (np.uint64(v & 0xFFFFFFFF) for v in key)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> shift) ^ c[1] ^ k0, p1 & mask, (p0 >> shift) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.stack(c, -1)


def words(index: npt.NDArray[np.int64], seed: int, site: int, stream: int) -> npt.NDArray[np.uint64]:
    """The 32-bit word of each linear index: word index % 4 of counter (index // 4, its high half, stream, 0)."""
    quad = (index // 4).astype(np.uint64)
    low, high = quad & np.uint64(0xFFFFFFFF), quad >> np.uint64(32)
    counter = np.stack([low, high, np.full_like(quad, stream), np.zeros_like(quad)], -1)
    return np.take_along_axis(philox(counter, (seed, site)), (index % 4)[..., None], -1)[..., 0]


def halves(index: npt.NDArray[np.int64], seed: int, site: int) -> npt.NDArray[np.int64]:
    """Sixteen bits of each linear index: of two neighbours' word the even one's are the low half."""
    return (words(index // 2, seed, site, 0).astype(np.int64) >> (index % 2 * 16)) & 0xFFFF


def uniform(index: npt.NDArray[np.int64], seed: int, site: int, stream: int) -> F32:
    """24 random bits of each linear index, in [0, 1)."""
    return ((words(index, seed, site, stream) >> np.uint64(8)).astype(np.float32) * f32(2.0**-24)).astype(np.float32)


def tree_sum(a: F32) -> F32:
    """Sum of the last axis in FP32: upper half onto lower half until one is left."""
    while a.shape[-1] > 1:
        half = a.shape[-1] // 2
        a = a[..., :half] + a[..., half:]
    return a[..., 0]


def finite_amax(x: F32) -> np.float32:
    """max |x| over the finite elements, 0 of none."""
    magnitude = np.abs(x[np.isfinite(x)])
    return f32(magnitude.max()) if magnitude.size else f32(0)


def log2_floor(x: F32) -> npt.NDArray[np.int64]:
    """floor(log2 x) for x > 0; -1000 for 0, 1000 for infinity and NaN (a sum that overflowed)."""
    return np.where(~np.isfinite(x), 1000, np.where(x > 0, np.frexp(np.asarray(x, np.float64))[1] - 1, -1000))


def log2_ceil_ratio(x: F32, maximum: float) -> npt.NDArray[np.int64]:
    """The smallest E with x <= maximum * 2^E, exactly (one division in float64 would round); -1000 for 0."""
    guess = log2_floor(x) - int(np.floor(np.log2(maximum)))
    return np.where(np.asarray(x, np.float64) > np.ldexp(maximum, guess), guess + 1, guess)


@dataclass
class Quantized:
    """Result: codes one a byte and not packed (R, Cp), their values, scales by block, NaN blocks, tensor or outer scales."""

    codes: U8
    values: F32
    scale_bytes: U8 | None
    scales: F32
    poisoned: npt.NDArray[np.bool_]
    tensor_scale: np.float32 | F32
    block: tuple[int, int]
    outer: int

    def spread(self, per_block: npt.NDArray) -> npt.NDArray:
        """One value a block to one an element, (R, Cp)."""
        return spread(per_block, self.block, self.codes.shape[0])

    def decode(self, columns: int) -> F32:
        """code * block scale, without the tensor scale; FP32."""
        with np.errstate(over="ignore"):  # a power of two above FLT_MAX
            return (self.values * self.spread(self.scales))[:, :columns]

    def dequantize(self, columns: int) -> F32:
        factor = np.asarray(self.tensor_scale)
        if self.outer:
            factor = np.repeat(factor, self.outer, 1)[:, :columns]
        with np.errstate(over="ignore"):
            return (self.decode(columns) * factor).astype(np.float32)

    def packed(self) -> U8:
        return pack(self.codes)


def spread(per_block: npt.NDArray, block: tuple[int, int], rows: int) -> npt.NDArray:
    return np.repeat(np.repeat(per_block, block[0], 0), block[1], 1)[:rows]


def pack(codes: U8) -> U8:
    """Even columns in the low nibble."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)


def _blocks(x: F32, block: tuple[int, int]) -> F32:
    """(R, Cp) to (row blocks, column blocks, b0 * b1), rows zero-padded."""
    rows = -(-x.shape[0] // block[0]) * block[0]
    x = np.pad(x, ((0, rows - x.shape[0]), (0, 0)))
    parts = x.reshape(rows // block[0], block[0], x.shape[1] // block[1], block[1]).transpose(0, 2, 1, 3)
    return parts.reshape(parts.shape[0], parts.shape[1], block[0] * block[1])


def _value(codes: U8, fmt: str) -> F32:
    sign_bit = 8 if fmt == "e2m1" else 128
    magnitude = table(fmt)[codes % sign_bit].astype(np.float32)
    return np.where(codes >= sign_bit, -magnitude, magnitude)


def quantize(x: F32, q: object, amax: float | None = None, seed: int = 0, site: int = 0) -> Quantized:
    """Quantize (R, C) float32 as the quantizer's fields (`name`, `block`, `rounding`, ...) say."""
    with np.errstate(all="ignore"):
        block = q.block  # type: ignore[attr-defined]
        rows, columns = x.shape
        padded = np.pad(x, ((0, 0), (0, -columns % block[1])))
        blocks = _blocks(padded, block)
        poisoned = np.asarray(~np.isfinite(blocks).all(-1))
        # A poisoned block is replaced by zeros: its codes mean nothing, its scale is NaN.
        clean = np.where(spread(poisoned, block, rows), f32(0), padded)
        index = np.arange(rows)[:, None] * columns + np.arange(padded.shape[1])[None, :]
        draw = None
        if q.rounding == "stochastic":  # type: ignore[attr-defined]
            draw = halves(index, seed, site)
        kind = {"nvfp4": _nvfp4, "mxfp4": _mx, "mxfp8": _mx, "fp8": _fp8}[q.name]  # type: ignore[attr-defined]
        outer = getattr(q, "outer", 0)
        scale_bytes: U8 | None
        tensor_scale: np.float32 | F32
        if outer:
            codes, scale_bytes, scales, tensor_scale = _by_group(clean, x, q, draw)
        else:
            maximum = finite_amax(x) if amax is None else f32(amax)
            codes, scale_bytes, scales, tensor_scale = kind(clean, q, maximum, draw, seed, site)
        fmt = getattr(q, "format", "e2m1")
        if scale_bytes is not None:
            scale_bytes = np.where(poisoned, NAN_BYTE[q.scale_format], scale_bytes)  # type: ignore[attr-defined]
        scales = np.where(poisoned, f32(np.nan), scales)
        return Quantized(codes, _value(codes, fmt), scale_bytes, scales, poisoned, np.float32(tensor_scale), block, outer)


Parts = tuple[U8, U8 | None, F32, np.float32]


def _scale(byte: npt.NDArray[np.int64], fmt: str) -> tuple[U8, F32]:
    return byte.astype(np.uint8), table(fmt)[byte].astype(np.float32)


def _nvfp4(x: F32, q: object, amax: np.float32, draw: I64 | None, seed: int, site: int) -> Parts:
    block, rows, fmt = q.block, x.shape[0], q.scale  # type: ignore[attr-defined]
    blocks = _blocks(x, block)
    block_amax = np.abs(blocks).max(-1) if blocks.shape[-1] and blocks.size else np.zeros(blocks.shape[:2], np.float32)
    if q.rounding == "ms_eden":  # type: ignore[attr-defined]
        if q.posthoc:  # type: ignore[attr-defined]
            return _posthoc_eden(x, block_amax, seed, site)
        return _ms_eden(x, amax, block_amax, seed, site)
    if q.four_six:  # type: ignore[attr-defined]
        return _four_six(x, q, amax, block_amax)
    factor = 6 * 16 / 17 if q.range_guard else 6.0  # type: ignore[attr-defined]
    enc = f32(1)
    if q.tensor_scale and amax > 0:  # type: ignore[attr-defined]
        enc = np.minimum(f32(6 * table(fmt)[-1]) / amax, FLT_MAX)
    t = np.minimum(block_amax * (enc * f32(1 / factor)), FLT_MAX)
    scale_bytes, scales = _scale(nearest_code(t, fmt), fmt)
    dec = f32(1) / enc
    e = np.minimum(f32(1) / (scales * dec), FLT_MAX)
    codes = element_code(np.clip(x * spread(e, block, rows), f32(-6), f32(6)), "e2m1", draw)
    return codes, scale_bytes, scales, dec


def _by_group(x: F32, given: F32, q: object, draw: I64 | None) -> tuple[U8, U8, F32, F32]:
    """Every group of q.outer columns of a row as a tensor of its own; `given` has the values that `x` has zeros for."""
    rows, columns = given.shape
    width = q.outer  # type: ignore[attr-defined]
    codes, scale_bytes = np.zeros(x.shape, np.uint8), np.zeros((rows, x.shape[1] // 16), np.uint8)
    scales, outer_scales = np.zeros(scale_bytes.shape, np.float32), np.zeros((rows, -(-columns // width)), np.float32)
    for r, g in np.ndindex(outer_scales.shape):
        one, part, parts = slice(r, r + 1), slice(g * width, (g + 1) * width), slice(g * width // 16, (g + 1) * width // 16)
        drawn = None if draw is None else draw[one, part]
        found = _nvfp4(x[one, part], q, finite_amax(given[one, part]), drawn, 0, 0)
        codes[one, part], scale_bytes[one, parts], scales[one, parts], outer_scales[r, g] = found
    return codes, scale_bytes, scales, outer_scales


def _encode_with(x: F32, scales: F32, tensor_scale: np.float32, block: tuple[int, int]) -> tuple[U8, F32]:
    """e2m1(x / (s*T)), 0 under a zero scale; also x / (s*T)."""
    step = spread(scales * tensor_scale, block, x.shape[0])
    ratio = np.where(step == 0, np.copysign(f32(0), x), x / step).astype(np.float32)
    return element_code(ratio, "e2m1"), ratio


def _head_room_scale(amax: np.float32, divisor: np.float32) -> np.float32:
    """amax / divisor; 1 when that is 0, because amax is 0 or so small that the quotient underflows."""
    quotient = amax / divisor
    return quotient if quotient > 0 else f32(1)


def _four_six(x: F32, q: object, amax: np.float32, block_amax: F32) -> Parts:
    block, fmt = q.block, q.scale  # type: ignore[attr-defined]
    # 256 of E4M3's 448 leaves room for the factor 6/4; other formats keep the same share of their range.
    top = f32(6 * table(fmt)[-1] * 256 / 448)
    tensor_scale = _head_room_scale(amax, top) if q.tensor_scale else f32(1)  # type: ignore[attr-defined]
    options = []
    for c in (6, 4):
        scale_bytes, scales = _scale(nearest_code(np.minimum(block_amax / (f32(c) * tensor_scale), FLT_MAX), fmt), fmt)
        codes, _ = _encode_with(x, scales, tensor_scale, block)
        error = x - _value(codes, "e2m1") * spread(scales * tensor_scale, block, x.shape[0])
        options.append((codes, scale_bytes, scales, tree_sum(_blocks(error * error, block))))
    four = options[1][3] < options[0][3]
    codes, scale_bytes, scales = (
        np.where(spread(four, block, x.shape[0]) if i == 0 else four, options[1][i], options[0][i]) for i in range(3)
    )
    return codes, scale_bytes, scales, tensor_scale


def _ms_eden(y: F32, amax: np.float32, block_amax: F32, seed: int, site: int) -> Parts:
    block = (1, 16)
    factor = 6 * (16 / 17) / 0.93
    tensor_scale = _head_room_scale(amax, f32(factor * 256))
    _, scales = _scale(nearest_code(block_amax / (f32(factor) * tensor_scale), "e4m3"), "e4m3")
    codes, _ = _encode_with(y, scales, tensor_scale, block)
    power = tree_sum(_blocks(y * y, block))
    cross = tree_sum(_blocks(y * _value(codes, "e2m1"), block)) * (scales * tensor_scale)
    # Sums of squares leave FP32's range near 1e-20 and 1e20; the scale is then left as it is.
    ratio = power / cross
    correction = np.where((cross > 0) & np.isfinite(ratio), ratio, f32(1)).astype(np.float32)
    u = uniform(np.arange(scales.size).reshape(scales.shape), seed, site, 2)
    scale_bytes, scales = _scale(stochastic_code(correction * scales, "e4m3", u), "e4m3")
    return codes, scale_bytes, scales, tensor_scale


def _posthoc_eden(y: F32, block_amax: F32, seed: int, site: int) -> Parts:
    block, one = (1, 16), f32(1)
    provisional = block_amax / f32(6 * (16 / 17) / 0.93)
    exponent = np.frexp(provisional.astype(np.float64))[1]  # of a mantissa in [1/2, 1), of which 1 + 4 bits are kept
    step = np.ldexp(1.0, np.maximum(exponent - 5, -130))  # a subnormal keeps the bits from 2^-130 up
    provisional = (np.floor(provisional / step) * step).astype(np.float32)
    codes, _ = _encode_with(y, provisional, one, block)
    power = tree_sum(_blocks(y * y, block))
    cross = tree_sum(_blocks(y * _value(codes, "e2m1"), block)) * provisional
    ratio = power / cross
    wide = provisional * np.where((cross > 0) & np.isfinite(ratio), ratio, one).astype(np.float32)
    tensor_scale = finite_amax(wide) / f32(256)
    tensor_scale = tensor_scale if tensor_scale > 0 else one
    u = uniform(np.arange(wide.size).reshape(wide.shape), seed, site, 2)
    scale_bytes, scales = _scale(stochastic_code(wide / tensor_scale, "e4m3", u), "e4m3")
    return codes, scale_bytes, scales, tensor_scale


def _std(blocks: F32) -> F32:
    n = f32(blocks.shape[-1])
    centred = blocks - (tree_sum(blocks) / n)[..., None]
    return np.sqrt(tree_sum(centred * centred) / n)


def _mx(x: F32, q: object, amax: np.float32, draw: I64 | None, seed: int, site: int) -> Parts:
    block, rule, fmt = q.block, q.scale_rule, getattr(q, "format", "e2m1")  # type: ignore[attr-defined]
    top, largest = {"e2m1": (2, 6.0), "e4m3": (8, 448.0), "e5m2": (15, 57344.0)}[fmt]
    blocks = _blocks(x, block)
    peak = np.abs(blocks).max(-1) if blocks.size else np.zeros(blocks.shape[:2], np.float32)
    mantissa = 2 * np.frexp(np.asarray(peak, np.float64))[0]
    exponent = {
        "floor": lambda: log2_floor(peak) - top,
        "even": lambda: log2_floor(peak) - top + (mantissa >= 1.75),
        "uos": lambda: log2_floor(peak) - top + (mantissa >= 1.8125),
        "ceil": lambda: log2_ceil_ratio(peak, largest),
        "rceil": lambda: log2_ceil_ratio(peak, largest),
        "range_fit": lambda: log2_floor(peak),
        "quest": lambda: log2_floor(_std(blocks) * f32(2.92247856 / 6) + f32(1e-8)),
    }[rule]()
    exponent = np.where(peak == 0, -127, np.clip(exponent, -127, 127))
    scale_bytes, scales = (exponent + 127).astype(np.uint8), np.ldexp(f32(1), exponent.astype(np.int32)).astype(np.float32)
    ratio = x / spread(scales, block, x.shape[0])
    # The exponent is that of the block before the factor, or a factor of 3/4 could not keep a maximum below 8 within 6.
    factor = getattr(q, "prescale", 1.0) * (3.0 if rule == "range_fit" else 1.0)
    return element_code(ratio * f32(factor), fmt, draw), scale_bytes, scales, f32(1 / factor)


def _fp8(x: F32, q: object, amax: np.float32, draw: I64 | None, seed: int, site: int) -> Parts:
    block, fmt = q.block, q.format  # type: ignore[attr-defined]
    blocks = _blocks(x, block)
    peak = np.abs(blocks).max(-1) if blocks.size else np.zeros(blocks.shape[:2], np.float32)
    scales = peak / f32(table(fmt)[-1])
    scales = np.where(scales == 0, f32(1), scales).astype(np.float32)
    return element_code(x / spread(scales, block, x.shape[0]), fmt), None, scales, f32(1)


def sign_vector(size: int, signs: str, vector: tuple[int, ...], seed: int, site: int) -> F32:
    """+-1 (n,): stored, or drawn from the top bits of stream 1."""
    if signs == "none":
        return np.ones(size, np.float32)
    if signs == "fixed":
        return np.tile(np.array(vector, np.float32), size // len(vector))
    drawn = words(np.arange(size), seed, site, 1)
    return np.where(drawn >= np.uint64(2**31), f32(-1), f32(1))


def hadamard(size: int) -> F64:
    """Sylvester's matrix, entries +-1: (-1)^(number of ones that i and j share)."""
    i = np.arange(size)
    shared = i[:, None] & i[None, :]
    return np.array([[(-1.0) ** int(v).bit_count() for v in row] for row in shared])


def rotate(x: F32, size: int, signs: F32, bf16: bool) -> F32:
    """Signs, then the butterfly and the rounding to BF16."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    y = _butterfly((padded.reshape(-1, size) * signs).astype(np.float32), size)
    if bf16:
        y = y.astype(ml_dtypes.bfloat16).astype(np.float32)
    return y.reshape(padded.shape)


def unrotate(y: F32, size: int, signs: F32, columns: int) -> F32:
    """The butterfly, then signs; the padding cut off. FP32."""
    return (_butterfly(y.reshape(-1, size).copy(), size) * signs).astype(np.float32).reshape(y.shape)[:, :columns]


def _butterfly(y: F32, size: int) -> F32:
    """In FP32, strides 1, 2, 4, ..., and one multiply."""
    stride = 1
    while stride < size:
        for start in range(0, size, 2 * stride):
            for i in range(start, start + stride):
                low, high = y[:, i].copy(), y[:, i + stride].copy()
                y[:, i], y[:, i + stride] = low + high, low - high
        stride *= 2
    return y * f32(1 / np.sqrt(size))


def clip_mask(x: F32, scale_bytes: U8, block: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """|x| < 6 * 2^E, exactly, for every element of the padded operand; False under a NaN scale and for NaN. (R, Cp)."""
    exponent = spread(scale_bytes.astype(np.int64) - 127, block, x.shape[0])
    bound = np.where(exponent == 128, np.nan, np.ldexp(6.0, exponent))
    magnitude = np.abs(np.pad(x, ((0, 0), (0, -x.shape[1] % block[1]))).astype(np.float64))
    return np.asarray(magnitude < bound)


def swizzle(scales: U8) -> U8:
    """Scale bytes by the tensor cores' offset formula, element by element."""
    rows, columns = scales.shape
    tiles_r, tiles_c = -(-rows // 128), -(-columns // 4)
    out = np.zeros(tiles_r * tiles_c * 512, np.uint8)
    for r in range(rows):
        for c in range(columns):
            offset = ((r // 128) * tiles_c + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            out[offset] = scales[r, c]
    return out
