"""bf16 -> nvfp4: packed, rows together in memory, for sm_90.

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
def bits(x):
    """The bits of FP32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def floats(i):
    """The FP32 values of these 32 bits."""
    return i.to(tl.float32, bitcast=True)


@triton.jit
def larger_of(a, b):
    """The larger magnitude of BF16, NaN where one is, two at once; its sign means nothing."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def larger_pairs(x):
    """`larger_of` rows i and N + i of BF16 (2N, G): (N, G)."""
    a, b = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
    return larger_of(a, b)


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
def near_inverse(d):
    """`inverse_of` d in 2^-126 .. 2^126, what rcp.rn.f32 does there without its branch for the rest; NaN of 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; fma.rn.f32 e, $1, r, 0fBF800000; neg.f32 e, e; fma.rn.f32 $0, r, e, r; }",
        "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1,
    )


@triton.jit
def bent(a):
    """2^-8 times a - (a - 2)+ / 2 - (a - 4)+ / 4 of magnitudes up to 6.5, for the conversion to E4M3.

    The constants are some units off: where a sum loses its last bit, each midpoint of E2M1 still rounds to even, and the FP32
    numbers beside it to their sides (tests/kernels/test_assembly.py takes every a).
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 v, w, t; fma.rn.sat.f32 v, $1, 0f3B000002, 0fBB800003; fma.rn.sat.f32 w, $1, 0f3A7FFFF8, 0fBB7FFFFB; "
        "neg.f32 v, v; fma.rn.f32 t, $1, 0f3B800000, v; sub.rn.f32 $0, t, w; }",
        "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1,
    )


@triton.jit
def bounded_pairs(x, bound):
    """BF16 x (U, G) with magnitudes of at most bound (G,), that of a NaN: min.xorsign.abs.bf16x2, two at once."""
    bound = bound.to(tl.bfloat16)[None, :]
    return tl.inline_asm_elementwise(
        "min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [x, bound], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def magnitude(x, y):
    """|x| * y in one instruction."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


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
def pair_bits(x):
    """BF16 (8, G) to the four words (G,) of two neighbours each."""
    even, odd = even_odd(x)
    word = tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=tl.int32, is_pure=True, pack=1)
    even, odd = even_odd(word)
    a, c = even_odd(even)
    b, d = even_odd(odd)
    return flat(a), flat(b), flat(c), flat(d)


@triton.jit
def bent_to_codes_signed(a, b, c, d, e, f, g, h, p, q, r, s):
    """The codes of eight values of `bent`, with the signs of four words of two BF16 each."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 h<4>; .reg .b32 a, b, c, e, o, p, q; prmt.b32 p, $9, $10, 0x7351; prmt.b32 q, $11, $12, 0x7351; cvt.rn.satfinite.e4m3x2.f32 h0, $3, $1; cvt.rn.satfinite.e4m3x2.f32 h1, $7, $5; cvt.rn.satfinite.e4m3x2.f32 h2, $4, $2; cvt.rn.satfinite.e4m3x2.f32 h3, $8, $6; mov.b32 a, {h0, h1}; mov.b32 b, {h2, h3}; mad.lo.u32 c, b, 16, a; prmt.b32 e, p, q, 0x5410; prmt.b32 o, p, q, 0x7632; shr.b32 e, e, 4; lop3.b32 c, e, 0x08080808, c, 0xEA; lop3.b32 $0, o, 0x80808080, c, 0xEA; }",
        "=r,f,f,f,f,f,f,f,f,r,r,r,r",
        [a, b, c, d, e, f, g, h, p, q, r, s],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def bent_words_signed(x, raw):
    """Values of `bent` (8, G), signs of raw, BF16, two neighbours a register: the codes of eight in a word, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    p, q, r, s = pair_bits(raw)
    return bent_to_codes_signed(a, b, c, d, e, f, g, h, p, q, r, s)


@triton.jit
def fp4_bf16_nvfp4_packed_rows(x_ptr, amax_ptr, tensor_scale_ptr, scales_ptr, codes_ptr, rows, columns, stride_r, stride_c, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
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
    tl.store(tensor_scale_ptr + tl.program_id(0), tensor_scale, mask=tl.program_id(0) == 0)
    down, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    down_step, across_step = tl.num_programs(0) // tiles, tl.num_programs(0) % tiles
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        # unit g holds columns 16 * unit ... 16 * unit + 15 of its row
        row = (down * TR + g // TB).to(tl.int64)
        unit = across * TB + g % TB

        # load: x (16, TR * TB), zero outside
        source = (x_ptr + row * stride_r + unit.to(tl.int64) * stride_c * 16)[None, :]
        j = tl.arange(0, 8)[:, None]
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j < columns)) | WHOLE
        raw0 = tl.load(source + j.to(tl.int64) * stride_c, mask=inside, other=0.0)
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + (j + 8) < columns)) | WHOLE
        raw1 = tl.load(source + (j + 8).to(tl.int64) * stride_c, mask=inside, other=0.0)
        x0 = unpack(raw0)
        x1 = unpack(raw1)
        x = tl.reshape(tl.permute(tl.join(x0, x1), (2, 0, 1)), (16, TR * TB))

        # amax of each block of 1 x 16: NaN stays NaN
        pair = larger_of(raw0, raw1)
        pair = larger_pairs(pair)
        pair = larger_pairs(pair)
        largest = tl.reduce(tl.abs(pair.to(tl.float32)), 0, larger)
        finite = largest < float("inf")
        block_max = tl.where(finite, largest, 0.0)

        # scales (NVIDIA 2509.25149, appendix B)
        s, scale_code = round_e4m3(block_max * (encode * 0.1666666716337204))
        inverse = tl.minimum(near_inverse(s * tensor_scale * boost) * boost, 3.4028234663852886e+38)
        bound = tl.maximum(6.0 * (s * tensor_scale), 1.7632415262334313e-38)
        scaled = bent(magnitude(unpack(bounded_pairs(raw0, bound)), inverse[None, :]))
        low = bent_words_signed(scaled, raw0)
        scaled = bent(magnitude(unpack(bounded_pairs(raw1, bound)), inverse[None, :]))
        high = bent_words_signed(scaled, raw1)
        scale_code = tl.where(finite, scale_code, 127)

        # store
        block_row, block_column = row, unit
        block_columns = units
        at = block_row * block_columns + block_column
        tl.store(scales_ptr + at, scale_code.to(tl.uint8), mask=((block_row < rows) & (block_column < block_columns)) | WHOLE)
        word = ((low.to(tl.uint64) & 0xFFFFFFFF) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
        # eight codes a word, the even column in the low nibble
        tl.store(codes_ptr + row * units + unit, word, mask=((row < rows) & (unit < units)) | WHOLE)
        next_across = across + across_step
        wraps = next_across >= tiles
        next_down = down + down_step + wraps.to(tl.int32)
        next_across = next_across - tl.where(wraps, tiles, 0)
        down, across = next_down, next_across


kernel = fp4_bf16_nvfp4_packed_rows
