"""bf16 -> hadamard[size=32,bf16=no] -> mxfp4[scale_rule=quest]: packed, rows together in memory, for sm_90.

A program takes TR rows x TB units of 16 columns. WHOLE: no tile reaches beyond the operand. Compile with build.COMPILE_OPTIONS.
"""

import triton
import triton.language as tl


@triton.jit
def unpack_product(x):
    """`unpack` by a product in place of a shift, whose units are busier: ptxas is not to know that it is by 2^16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 p; mov.u32 p, %ctaid.z; add.u32 p, p, 65536; mul.lo.u32 $0, $2, p; and.b32 $1, $2, 0xffff0000; }",
        "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
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
def bits(x):
    """The bits of FP32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def larger(a, b):
    """The larger one, NaN where one is: max.NaN.f32."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_halves(x, B: tl.constexpr):
    """Flat x seen as (A, 2, B): the larger of the two, flat; NaN where one is."""
    return tl.reshape(tl.reduce(tl.reshape(x, (x.shape[0] // (2 * B), 2, B)), 1, larger), (x.shape[0] // 2,))


@triton.jit
def group_amax(x, N: tl.constexpr, B: tl.constexpr):
    """Flat x seen as (A, N, B): the largest of each N, flat; NaN stays NaN."""
    return tl.reshape(tl.reduce(tl.reshape(x, (x.shape[0] // (N * B), N, B)), 1, larger), (x.shape[0] // N,))


@triton.jit
def add_halves(x, B: tl.constexpr):
    """Flat x seen as (A, 2, B): the sums of the two, flat. One step of a pairwise sum."""
    return tl.reshape(tl.sum(tl.reshape(x, (x.shape[0] // (2 * B), 2, B)), 1), (x.shape[0] // 2,))


@triton.jit
def repeat(x, N: tl.constexpr, B: tl.constexpr):
    """Flat x seen as (A, 1, B), each N times: flat."""
    A: tl.constexpr = x.shape[0] // B
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (A, 1, B)), (A, N, B)), (x.shape[0] * N,))


@triton.jit
def e8m0_inverse(code):
    """2^(127 - code) of codes 0..254."""
    return floats(tl.maximum((254 - code) << 23, 0x00400000))


@triton.jit
def e8m0_value(code):
    """2^(code - 127) of codes 0..254."""
    return floats(tl.maximum(code << 23, 0x00400000))


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
def with_sign(magnitude, x):
    """The magnitude with the sign bit of x, -0.0 included."""
    return floats(bits(magnitude) | (bits(x) & -0x80000000))


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
def bent_to_codes(a, b, c, d, e, f, g, h):
    """The codes of eight values of `bent` with their signs."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 h<4>; .reg .b32 a, b, c, d; cvt.rn.satfinite.e4m3x2.f32 h0, $3, $1; cvt.rn.satfinite.e4m3x2.f32 h1, $7, $5; cvt.rn.satfinite.e4m3x2.f32 h2, $4, $2; cvt.rn.satfinite.e4m3x2.f32 h3, $8, $6; mov.b32 a, {h0, h1}; mov.b32 b, {h2, h3}; mad.lo.u32 c, b, 16, a; shr.b32 d, a, 4; lop3.b32 c, 0x77777777, c, d, 0xCA; lop3.b32 $0, b, 0x80808080, c, 0xEA; }",
        "=r,f,f,f,f,f,f,f,f",
        [a, b, c, d, e, f, g, h],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def bent_words(x):
    """Signed values of `bent` (8, G): the codes of eight in a word, row 0 lowest, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    return bent_to_codes(a, b, c, d, e, f, g, h)


@triton.jit
def halves(x):
    """(16, G): rows 0 to 7 and rows 8 to 15."""
    return tl.split(tl.permute(tl.reshape(x, (2, 8, x.shape[1])), (1, 2, 0)))


@triton.jit
def fp4_bf16_hadamard_size_32_bf16_no_mxfp4_scale_rule_quest_packed_rows(x_ptr, tensor_scale_ptr, scales_ptr, codes_ptr, rows, columns, stride_r, stride_c, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    width = tl.cdiv(columns, 32) * 32
    units = tl.cdiv(width, 32) * 2
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # of a row, numbered one after the other
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    tl.store(tensor_scale_ptr + tl.program_id(0), 1.0, mask=tl.program_id(0) == 0)
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
        x0 = unpack_product(raw0)
        x1 = unpack_product(raw1)
        x = tl.reshape(tl.permute(tl.join(x0, x1), (2, 0, 1)), (16, TR * TB))

        # rotate: signs (none), 5 butterfly stages, 1/sqrt(32)
        x = tl.reshape(x, (16 * TR * TB,))
        x = butterfly(x, 1 * TR * TB)
        x = butterfly(x, 2 * TR * TB)
        x = butterfly(x, 4 * TR * TB)
        x = butterfly(x, 8 * TR * TB)
        x = butterfly(x, 1)
        x = tl.reshape(x, (16, TR * TB))
        x = x * 0.1767766922712326

        # amax of each block of 1 x 32: NaN stays NaN
        largest = tl.reshape(tl.abs(x), (16 * TR * TB,))
        largest = larger_halves(largest, 8 * TR * TB)
        largest = larger_halves(largest, 4 * TR * TB)
        largest = larger_halves(largest, 2 * TR * TB)
        largest = larger_halves(largest, 1 * TR * TB)
        largest = group_amax(largest, 2, 1)
        finite = largest < float("inf")
        block_max = tl.where(finite, largest, 0.0)

        # scales: 2^E, quest (OCP Microscaling 1.0)
        centred = tl.where((bits(x) & 0x7FFFFFFF) < 0x7F800000, x, 0.0)
        mean = tl.reshape(centred, (16 * TR * TB,))
        mean = add_halves(mean, 1)
        mean = add_halves(mean, 8 * TR * TB // 2)
        mean = add_halves(mean, 4 * TR * TB // 2)
        mean = add_halves(mean, 2 * TR * TB // 2)
        mean = add_halves(mean, 1 * TR * TB // 2)
        mean = mean * 0.03125
        centred = centred - (repeat(mean, 2, 1))[None, :]
        variance = tl.reshape(centred * centred, (16 * TR * TB,))
        variance = add_halves(variance, 1)
        variance = add_halves(variance, 8 * TR * TB // 2)
        variance = add_halves(variance, 4 * TR * TB // 2)
        variance = add_halves(variance, 2 * TR * TB // 2)
        variance = add_halves(variance, 1 * TR * TB // 2)
        sigma = tl.sqrt_rn(variance * 0.03125)
        exponent = (bits(sigma * 0.48707976937294006 + 9.99999993922529e-09) >> 23) & 0xFF
        scale_code = tl.where(block_max > 0.0, tl.minimum(exponent, 254), 0)
        inverse = repeat(e8m0_inverse(scale_code), 2, 1)
        scaled = with_sign(bent(tl.minimum(tl.abs(x * inverse[None, :]), 6.0)), x)
        scaled_left, scaled_right = halves(scaled)
        low = bent_words(scaled_left)
        high = bent_words(scaled_right)
        scale_code = tl.where(finite, scale_code, 255)

        # store
        b = tl.arange(0, (TR) * (TB // 2))
        block_row = (down * (TR) + b // (TB // 2)).to(tl.int64)
        block_column = across * (TB // 2) + b % (TB // 2)
        block_columns = units // 2
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


kernel = fp4_bf16_hadamard_size_32_bf16_no_mxfp4_scale_rule_quest_packed_rows
