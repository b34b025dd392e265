"""bf16 -> hadamard[signs=fixed] -> nvfp4: packed, columns together in memory, for sm_90.

A program takes TR rows x TB units of 16 columns. Compile with build.COMPILE_OPTIONS.
"""

import triton
import triton.language as tl


@triton.jit
def floats(i):
    """The FP32 values of these 32 bits."""
    return i.to(tl.float32, bitcast=True)


@triton.jit
def butterfly(x, B: tl.constexpr):
    """One stage of a Hadamard transform: flat x seen as (A, 2, B), [a, b] becomes [a + b, a - b]."""
    pairs = tl.reshape(x, (x.shape[0] // (2 * B), 2, B))
    pattern = pairs.to(tl.uint32, bitcast=True)
    # The partner of each: the sum of both bit patterns less its own. Folded away in one thread, one shuffle between two.
    partner = floats(tl.sum(pattern, 1, keep_dims=True).to(tl.uint32) - pattern)
    sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)
    # The product is exact, so a fused sum is the plain one.
    sign = tl.broadcast_to(sign[None, :, None], pairs.shape)
    return tl.reshape(tl.fma(pairs, sign, partner), (x.shape[0],))


@triton.jit
def round_bf16_pairs(x):
    """FP32 rounded to the nearest BF16, still FP32; cvt.rn.bf16x2.f32, two at once (one alone is a slow instruction)."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000; }",
        "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
    )


@triton.jit
def bits(x):
    """The bits of FP32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def larger(a, b):
    """The larger one, NaN where one is: max.NaN.f32."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_exmy(a, M: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr):
    """Magnitudes to a format of M mantissa bits, half to even, saturating at TOP: (value FP32, code int32)."""
    a = tl.where(a < TOP, a, TOP)
    # Binades above the first, in which the subnormals lie on the same grid.
    above = tl.maximum((bits(a) & 0x7F800000) - ((128 - BIAS) << 23), 0)
    t = a * floats(((126 + M + BIAS) << 23) - above) + 12582912.0
    value = (t - 12582912.0) * floats(above + ((128 - BIAS - M) << 23))
    return value, (above >> (23 - M)) + (bits(t) - 0x4B400000)


@triton.jit
def round_e2m1(a):
    """Magnitudes to E2M1, half to even, saturating: (value FP32, code int32 in 0..7)."""
    a = tl.minimum(a, 6.0)
    binade = bits(tl.maximum(a, 1.0)) & 0x7F800000  # 1, 2 or 4: below 1 the step is that of [1, 2)
    magic = floats(binade + 0x0B400000)  # 1.5 * 2^22 times the binade, one unit of which is the step
    t = a + magic
    return t - magic, (bits(t) + (binade >> 22) + 2) & 7


@triton.jit
def fp4_bf16_hadamard_signs_fixed_nvfp4_packed_columns(x_ptr, amax_ptr, tensor_scale_ptr, scales_ptr, codes_ptr, rows, columns, stride_r, stride_c, TR: tl.constexpr, TB: tl.constexpr):
    width = tl.cdiv(columns, 16) * 16
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # in a row
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    sign = (tl.full((1, 1), 0xd7e8, tl.uint32) >> (k).to(tl.uint32)) & 1
    sign = 1.0 - 2.0 * sign.to(tl.float32)
    tensor_max = tl.load(amax_ptr)
    encode = tl.where(tensor_max > 0.0, tl.minimum(tl.div_rn(2688.0, tensor_max), 3.4028234663852886e+38), 1.0)
    tensor_scale = tl.div_rn(1.0, encode)
    tl.store(tensor_scale_ptr + tl.program_id(0), tensor_scale, mask=tl.program_id(0) == 0)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        # unit g holds columns 16 * unit ... 16 * unit + 15 of its row
        row = (tile // tiles * TR + g % TR).to(tl.int64)
        unit = tile % tiles * TB + g // TR

        # load: x (16, TR * TB), zero outside
        source = (x_ptr + row * stride_r + unit.to(tl.int64) * stride_c * 16)[None, :]
        j = tl.arange(0, 16)[:, None]
        source = tl.max_contiguous(source, (1, 4))  # 4 rows a thread: more would take all its registers
        inside = (row < rows)[None, :] & (unit[None, :] * 16 + j < columns)
        x = tl.load(source + j.to(tl.int64) * stride_c, mask=inside, other=0.0).to(tl.float32)

        # rotate: signs (fixed), 4 butterfly stages, 1/sqrt(16)
        x = x * sign
        x = tl.reshape(x, (16 * TR * TB,))
        x = butterfly(x, 1 * TR * TB)
        x = butterfly(x, 2 * TR * TB)
        x = butterfly(x, 4 * TR * TB)
        x = butterfly(x, 8 * TR * TB)
        x = tl.reshape(x, (16, TR * TB))
        x = x * 0.25
        x = round_bf16_pairs(x)

        # amax of each block of 1 x 16: NaN stays NaN
        largest = tl.reduce(tl.abs(x), 0, larger)
        finite = largest < float("inf")
        block_max = tl.where(finite, largest, 0.0)

        # scales (NVIDIA 2509.25149, appendix B)
        s, scale_code = round_exmy(block_max * (encode * 0.1666666716337204), 3, 7, 448.0)
        inverse = tl.minimum(tl.div_rn(1.0, s * tensor_scale), 3.4028234663852886e+38)
        value, code = round_e2m1(tl.abs(x * inverse[None, :]))
        code = code | (bits(x) >> 28) & 8
        scale_code = tl.where(finite, scale_code, 127)

        # store
        block_row, block_column = row, unit
        block_columns = units
        at = block_row * block_columns + block_column
        tl.store(scales_ptr + at, scale_code.to(tl.uint8), mask=(block_row < rows) & (block_column < block_columns))
        # eight codes a word, the even column in the low nibble
        shifted = tl.reshape(code, (2, 8, TR * TB)) << (tl.arange(0, 8) * 4)[None, :, None]
        words = tl.sum(shifted, 1).to(tl.uint32)  # (2, TR * TB)
        low, high = tl.split(tl.permute(words, (1, 0)))
        word = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
        word_row = ((tile // tiles) * (TR) + tl.arange(0, TR)[:, None]).to(tl.int64)
        word_unit = tile % tiles * (TB) + tl.arange(0, TB)[None, :]
        tl.store(codes_ptr + word_row * units + word_unit, tl.trans(tl.reshape(word, (TB, TR))), mask=(word_row < rows) & (word_unit < units))


kernel = fp4_bf16_hadamard_signs_fixed_nvfp4_packed_columns
