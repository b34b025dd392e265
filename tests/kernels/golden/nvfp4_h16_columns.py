"""bf16 -> hadamard[signs=fixed] -> nvfp4: packed, columns together in memory, for sm_90.

A program takes TR rows x TB units of 16 columns. WHOLE: no tile reaches beyond the operand. Compile with build.COMPILE_OPTIONS.
"""

import triton
import triton.language as tl


@triton.jit
def unpack(x):
    """BF16 to FP32, two at once."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )


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
def round_e4m3(a):
    """`round_exmy` to E4M3 by cvt.rn.satfinite.e4m3x2.f32 and back (sm_89)."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; .reg .b16 p, f, g; .reg .b32 v; min.f32 a, $2, 0f43E00000; "
        "cvt.rn.satfinite.e4m3x2.f32 p, 0f00000000, a; cvt.u32.u16 $1, p; "
        "cvt.rn.f16x2.e4m3x2 v, p; mov.b32 {f, g}, v; cvt.f32.f16 $0, f; }",
        "=f,=r,f", [a], dtype=(tl.float32, tl.int32), is_pure=True, pack=1,
    )


@triton.jit
def inverse_of(d):
    """1/d, rounded to the nearest: rcp.rn.f32, shorter than a division."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def round_e2m1_fma(a):
    """`round_e2m1` without an integer sum, which takes a register of its own."""
    a = tl.minimum(a, 6.0)
    binade = floats(bits(tl.maximum(a, 1.0)) & 0x7F800000)
    t = tl.fma(binade, 4194304.0, a)
    return tl.fma(binade, -4194304.0, t), (bits(t) + (bits(binade) >> 22) + 2) & 7


@triton.jit
def even_odd(x):
    """(2N, G): its even rows and its odd rows."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))


@triton.jit
def flat(x):
    """One row (1, G) as (G,)."""
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def rows8(x):
    """The eight rows (G,) of (8, G)."""
    even, odd = even_odd(x)
    even, two_six = even_odd(even)
    odd, three_seven = even_odd(odd)
    a, e = even_odd(even)
    b, f = even_odd(odd)
    c, g = even_odd(two_six)
    d, h = even_odd(three_seven)
    return flat(a), flat(b), flat(c), flat(d), flat(e), flat(f), flat(g), flat(h)


@triton.jit
def values_to_codes(a, b, c, d, e, f, g, h):
    """The codes of eight values of E2M1 by cvt.rn.satfinite.e4m3x2.f32 (sm_89): 2^-6 times them, E4M3's bytes are s00ccc00."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 x<8>; .reg .b16 h<4>; .reg .b32 a, b, c, d; mul.f32 x0, $1, 0f3C800000; mul.f32 x1, $2, 0f3C800000; mul.f32 x2, $3, 0f3C800000; mul.f32 x3, $4, 0f3C800000; mul.f32 x4, $5, 0f3C800000; mul.f32 x5, $6, 0f3C800000; mul.f32 x6, $7, 0f3C800000; mul.f32 x7, $8, 0f3C800000; cvt.rn.satfinite.e4m3x2.f32 h0, x2, x0; cvt.rn.satfinite.e4m3x2.f32 h1, x6, x4; cvt.rn.satfinite.e4m3x2.f32 h2, x3, x1; cvt.rn.satfinite.e4m3x2.f32 h3, x7, x5; mov.b32 a, {h0, h1}; mov.b32 b, {h2, h3}; shr.b32 c, a, 2; shr.b32 a, a, 4; and.b32 c, c, 0x07070707; lop3.b32 c, a, 0x08080808, c, 0xEA; shl.b32 d, b, 2; lop3.b32 c, d, 0x70707070, c, 0xEA; lop3.b32 $0, b, 0x80808080, c, 0xEA; }",
        "=r,f,f,f,f,f,f,f,f",
        [a, b, c, d, e, f, g, h],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def e2m1_words(x):
    """FP32 values of E2M1 (8, G): the codes of eight in a word, row 0 lowest, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    return values_to_codes(a, b, c, d, e, f, g, h)


@triton.jit
def with_sign(magnitude, x):
    """The magnitude with the sign bit of x, -0.0 included."""
    return floats(bits(magnitude) | (bits(x) & -0x80000000))


@triton.jit
def halves(x):
    """(16, G): rows 0 to 7 and rows 8 to 15."""
    return tl.split(tl.permute(tl.reshape(x, (2, 8, x.shape[1])), (1, 2, 0)))


@triton.jit
def fp4_bf16_hadamard_signs_fixed_nvfp4_packed_columns(x_ptr, amax_ptr, tensor_scale_ptr, scales_ptr, codes_ptr, rows, columns, stride_r, stride_c, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    width = tl.cdiv(columns, 16) * 16
    units = tl.cdiv(width, 16)
    if WHOLE:
        units = tl.multiple_of(width // 16, TB)
    tiles = tl.maximum(tl.cdiv(rows, TR), 1)  # of a column, numbered one after the other
    total = tl.maximum(tl.cdiv(units, TB), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    sign = (tl.full((1, 1), 0xd7e8, tl.uint32) >> (k).to(tl.uint32)) & 1
    sign = 1.0 - 2.0 * sign.to(tl.float32)
    tensor_max = tl.load(amax_ptr)
    encode = tl.where(tensor_max > 0.0, tl.minimum(tl.div_rn(2688.0, tensor_max), 3.4028234663852886e+38), 1.0)
    tensor_scale = tl.div_rn(1.0, encode)
    tl.store(tensor_scale_ptr + tl.program_id(0), tensor_scale, mask=tl.program_id(0) == 0)
    across, down = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    across_step, down_step = tl.num_programs(0) // tiles, tl.num_programs(0) % tiles
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        # unit g holds columns 16 * unit ... 16 * unit + 15 of its row
        row = (down * TR + g % TR).to(tl.int64)
        unit = across * TB + g // TR

        # load: x (16, TR * TB), zero outside
        source = (x_ptr + row * stride_r + unit.to(tl.int64) * stride_c * 16)[None, :]
        j = tl.arange(0, 16)[:, None]
        source = tl.max_contiguous(source, (1, 4))  # 4 rows a thread: more would take all its registers
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j < columns)) | WHOLE
        raw0 = tl.load(source + j.to(tl.int64) * stride_c, mask=inside, other=0.0)
        x = unpack(raw0)

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
        s, scale_code = round_e4m3(block_max * (encode * 0.1666666716337204))
        inverse = tl.minimum(inverse_of(s * tensor_scale), 3.4028234663852886e+38)
        value, code = round_e2m1_fma(tl.abs(x * inverse[None, :]))
        scale_code = tl.where(finite, scale_code, 127)

        # store
        block_row = (down * (TR) + tl.arange(0, TR)[:, None]).to(tl.int64)
        block_column = across * (TB) + tl.arange(0, TB)[None, :]
        block_columns = units
        at = block_row * block_columns + block_column
        tl.store(scales_ptr + at, tl.trans(tl.reshape(scale_code, (TB, TR))).to(tl.uint8), mask=((block_row < rows) & (block_column < block_columns)) | WHOLE)
        signed = with_sign(value, x)
        left, right = halves(signed)
        low, high = e2m1_words(left), e2m1_words(right)
        word = ((low.to(tl.uint64) & 0xFFFFFFFF) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
        stored_row = (down * (TR) + tl.arange(0, TR)[:, None]).to(tl.int64)
        stored_unit = across * (TB) + tl.arange(0, TB)[None, :]
        # eight codes a word, the even column in the low nibble
        tl.store(codes_ptr + stored_row * units + stored_unit, tl.trans(tl.reshape(word, (TB, TR))), mask=((stored_row < rows) & (stored_unit < units)) | WHOLE)
        next_down = down + down_step
        wraps = next_down >= tiles
        next_across = across + across_step + wraps.to(tl.int32)
        next_down = next_down - tl.where(wraps, tiles, 0)
        down, across = next_down, next_across


kernel = fp4_bf16_hadamard_signs_fixed_nvfp4_packed_columns
