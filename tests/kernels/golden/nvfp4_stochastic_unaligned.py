"""fp32 -> nvfp4[rounding=stochastic]: packed, rows together in memory, for sm_90.

A program takes TR rows x TB units of 16 columns. WHOLE: no tile reaches beyond the operand. Compile with build.COMPILE_OPTIONS.
"""

import triton
import triton.language as tl


@triton.jit
def bits(x):
    """The bits of FP32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def floats(i):
    """The FP32 values of these 32 bits."""
    return i.to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    """The larger one, NaN where one is: max.NaN.f32."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_halves(x, B: tl.constexpr):
    """Flat x seen as (A, 2, B): the larger of the two, flat; NaN where one is."""
    return tl.reshape(tl.reduce(tl.reshape(x, (x.shape[0] // (2 * B), 2, B)), 1, larger), (x.shape[0] // 2,))


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
def near_inverse(d):
    """`inverse_of` d in 2^-126 .. 2^126, what rcp.rn.f32 does there without its branch for the rest; NaN of 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; fma.rn.f32 e, $1, r, 0fBF800000; neg.f32 e, e; fma.rn.f32 $0, r, e, r; }",
        "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1,
    )


@triton.jit
def philox(counter, stream, seed, site):
    """Philox4x32-10: four random words (uint32) of each counter (int64)."""
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2 = tl.full(counter.shape, stream, tl.uint32)
    c3 = tl.zeros(counter.shape, tl.uint32)
    k0, k1 = seed, site
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def any_words(index, stream, seed, site):
    """Random words of elements of any index, of the shape of `index`; four are drawn for each."""
    a, b, c, d = philox(index // 4, stream, seed, site)
    j = index % 4
    return tl.where(j < 2, tl.where(j == 0, a, b), tl.where(j == 2, c, d))


@triton.jit
def any_draws(index, stream, seed, site):
    """Draws of 16 bits for elements of any index, of the shape of `index`, int32."""
    word = any_words(index // 2, stream, seed, site)
    return ((word >> (index % 2 * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def round_e2m1_stochastic_fma(a, draw):
    """`round_e2m1_stochastic` with no comparison: fma.rn.sat.f32, of the units that rounding leaves idle."""
    a = tl.minimum(a, 6.0)
    below = tl.inline_asm_elementwise(  # sat(2^24 - 2^24 a): 1 where a < 1, else 0
        "fma.rn.sat.f32 $0, $1, 0fCB800000, 0f4B800000;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )
    i = bits(a + below) + ((draw << 6) | 32)
    return floats(i & -0x400000) - below, (i - bits(tl.maximum(below, 0.5))) >> 22


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


@triton.jit(do_not_specialize=['site'])
def fp4_fp32_nvfp4_rounding_stochastic_packed_rows(x_ptr, amax_ptr, seed_ptr, tensor_scale_ptr, scales_ptr, codes_ptr, rows, columns, stride_r, stride_c, site, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    width = columns
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # of a row, numbered one after the other
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    tensor_max = tl.load(amax_ptr)
    encode = tl.where(tensor_max > 0.0, tl.minimum(tl.div_rn(2688.0, tensor_max), 3.4028234663852886e+38), 1.0)
    tensor_scale = tl.div_rn(1.0, encode)
    boost = tl.where(tensor_scale < 8.673617379884035e-19, 1.152921504606847e+18, 1.0)
    seed = tl.load(seed_ptr).to(tl.uint32)
    tl.store(tensor_scale_ptr + tl.program_id(0), tensor_scale, mask=tl.program_id(0) == 0)
    down, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    down_step, across_step = tl.num_programs(0) // tiles, tl.num_programs(0) % tiles
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        # unit g holds columns 16 * unit ... 16 * unit + 15 of its row
        row = (down * TR + g // TB).to(tl.int64)
        unit = across * TB + g % TB

        # load: x (16, TR * TB), zero outside
        source = (x_ptr + row * stride_r + unit.to(tl.int64) * stride_c * 16)[None, :]
        j = tl.arange(0, 4)[:, None]
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j < columns)) | WHOLE
        x0 = tl.load(source + j.to(tl.int64) * stride_c, mask=inside, other=0.0)
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + (j + 4) < columns)) | WHOLE
        x1 = tl.load(source + (j + 4).to(tl.int64) * stride_c, mask=inside, other=0.0)
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + (j + 8) < columns)) | WHOLE
        x2 = tl.load(source + (j + 8).to(tl.int64) * stride_c, mask=inside, other=0.0)
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + (j + 12) < columns)) | WHOLE
        x3 = tl.load(source + (j + 12).to(tl.int64) * stride_c, mask=inside, other=0.0)
        x0 = x0.to(tl.float32)
        x1 = x1.to(tl.float32)
        x2 = x2.to(tl.float32)
        x3 = x3.to(tl.float32)
        x = tl.reshape(tl.permute(tl.join(tl.join(x0, x1), tl.join(x2, x3)), (3, 2, 0, 1)), (16, TR * TB))

        # amax of each block of 1 x 16: NaN stays NaN
        largest = tl.reshape(tl.abs(x), (16 * TR * TB,))
        largest = larger_halves(largest, 8 * TR * TB)
        largest = larger_halves(largest, 4 * TR * TB)
        largest = larger_halves(largest, 2 * TR * TB)
        largest = larger_halves(largest, 1 * TR * TB)
        finite = largest < float("inf")
        block_max = tl.where(finite, largest, 0.0)

        # scales (NVIDIA 2509.25149, appendix B)
        s, scale_code = round_e4m3(block_max * (encode * 0.1666666716337204))
        inverse = tl.minimum(near_inverse(s * tensor_scale * boost) * boost, 3.4028234663852886e+38)
        draw = any_draws((row * width + unit * 16)[None, :] + k, 0, seed, site.to(tl.uint32))
        value, code = round_e2m1_stochastic_fma(tl.abs(x * inverse[None, :]), draw)
        scale_code = tl.where(finite, scale_code, 127)

        # store
        block_row, block_column = row, unit
        block_columns = units
        at = block_row * block_columns + block_column
        tl.store(scales_ptr + at, scale_code.to(tl.uint8), mask=((block_row < rows) & (block_column < block_columns)) | WHOLE)
        signed = with_sign(value, x)
        signed_left, signed_right = halves(signed)
        low = e2m1_words(signed_left)
        high = e2m1_words(signed_right)
        word = ((low.to(tl.uint64) & 0xFFFFFFFF) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
        # eight codes a word, the even column in the low nibble
        tl.store(codes_ptr + row * units + unit, word, mask=((row < rows) & (unit < units)) | WHOLE)
        next_across = across + across_step
        wraps = next_across >= tiles
        next_down = down + down_step + wraps.to(tl.int32)
        next_across = next_across - tl.where(wraps, tiles, 0)
        down, across = next_down, next_across


kernel = fp4_fp32_nvfp4_rounding_stochastic_packed_rows
