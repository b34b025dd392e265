"""bf16 -> hadamard[size=128,signs=fresh,bf16=no] -> nvfp4[rounding=ms_eden]: packed, rows together in memory, for sm_90.

A program takes TR rows x TB units of 16 columns. Compile with build.COMPILE_OPTIONS.
"""

import triton
import triton.language as tl


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
def interleave(a, b, c, d, N: tl.constexpr, G: tl.constexpr):
    """Four (N, G): row 4i + j of the result (4N, G) is row i of the j-th."""
    return tl.reshape(tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 3, 2, 1)), (4 * N, G))


@triton.jit
def element_words(first, stream, seed, site, U: tl.constexpr):
    """Random words of U consecutive elements from each index of `first` (G,), multiples of 4: (U, G)."""
    counter = (first // 4)[None, :] + tl.arange(0, U // 4)[:, None]
    a, b, c, d = philox(counter, stream, seed, site)
    return interleave(a, b, c, d, U // 4, first.shape[0])


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
def round_exmy(a, M: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr):
    """Magnitudes to a format of M mantissa bits, half to even, saturating at TOP: (value FP32, code int32)."""
    a = tl.where(a < TOP, a, TOP)
    # Binades above the first, in which the subnormals lie on the same grid.
    above = tl.maximum((bits(a) & 0x7F800000) - ((128 - BIAS) << 23), 0)
    t = a * floats(((126 + M + BIAS) << 23) - above) + 12582912.0
    value = (t - 12582912.0) * floats(above + ((128 - BIAS - M) << 23))
    return value, (above >> (23 - M)) + (bits(t) - 0x4B400000)


@triton.jit
def divide(x, d):
    """x (U, G) / d (G,), rounded to the nearest where it is in 2^-100 .. 2^100; tiny, huge or NaN beyond.

    One IEEE reciprocal for all of a column, then Markstein's correction, twice: fma.rn.f32. d comes into [1, 2) first, so that
    nothing that matters over- or underflows.
    """
    power = floats(tl.minimum(tl.maximum((254 << 23) - (bits(d) & 0x7F800000), 1 << 23), 253 << 23))
    n = d * power
    r = tl.broadcast_to(tl.div_rn(1.0, n)[None, :], x.shape)
    minus = tl.broadcast_to((n * -1.0)[None, :], x.shape)
    x = x * power[None, :]
    q = x * r
    q = tl.fma(tl.fma(q, minus, x), r, q)
    return tl.fma(tl.fma(q, minus, x), r, q)


@triton.jit
def round_e2m1(a):
    """Magnitudes to E2M1, half to even, saturating: (value FP32, code int32 in 0..7)."""
    a = tl.minimum(a, 6.0)
    binade = bits(tl.maximum(a, 1.0)) & 0x7F800000  # 1, 2 or 4: below 1 the step is that of [1, 2)
    magic = floats(binade + 0x0B400000)  # 1.5 * 2^22 times the binade, one unit of which is the step
    t = a + magic
    return t - magic, (bits(t) + (binade >> 22) + 2) & 7


@triton.jit
def add_halves(x, B: tl.constexpr):
    """Flat x seen as (A, 2, B): the sums of the two, flat. One step of a pairwise sum."""
    return tl.reshape(tl.sum(tl.reshape(x, (x.shape[0] // (2 * B), 2, B)), 1), (x.shape[0] // 2,))


@triton.jit
def any_words(index, stream, seed, site):
    """Random words of elements of any index, of the shape of `index`; four are drawn for each."""
    a, b, c, d = philox(index // 4, stream, seed, site)
    j = index % 4
    return tl.where(j < 2, tl.where(j == 0, a, b), tl.where(j == 2, c, d))


@triton.jit
def uniform(word):
    """FP32 in [0, 1) from the upper 24 bits of random words."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def round_exmy_stochastic(a, word, M: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr):
    """Magnitudes to a format of M mantissa bits, up where uniform(word) is below the fraction: (value FP32, code int32)."""
    a = tl.where(a < TOP, a, TOP)
    above = tl.maximum((bits(a) & 0x7F800000) - ((128 - BIAS) << 23), 0)
    t = a * floats(((126 + M + BIAS) << 23) - above)
    low = tl.floor(t)
    n = low + (uniform(word) < t - low).to(tl.float32)
    value = n * floats(above + ((128 - BIAS - M) << 23))
    return value, (above >> (23 - M)) + n.to(tl.int32)


@triton.jit(do_not_specialize=['signs_site', 'site'])
def fp4_bf16_hadamard_size_128_signs_fresh_bf16_no_nvfp4_rounding_ms_eden_packed_rows(x_ptr, seed_ptr, amax_ptr, tensor_scale_ptr, scales_ptr, codes_ptr, rows, columns, stride_r, stride_c, signs_site, site, TR: tl.constexpr, TB: tl.constexpr):
    width = tl.cdiv(columns, 128) * 128
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # in a row
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    seed = tl.load(seed_ptr).to(tl.uint32)
    drawn = tl.arange(0, 8).to(tl.int64) * 16
    sign = element_words(drawn, 1, seed, signs_site.to(tl.uint32), 16) >> 31  # (16, 8)
    sign = 1.0 - 2.0 * sign.to(tl.float32)
    sign = tl.reshape(tl.broadcast_to(sign[:, None, :], (16, TR * TB // 8, 8)), (16, TR * TB))
    tensor_scale = tl.div_rn(tl.load(amax_ptr), 1554.459228515625)
    tensor_scale = tl.where(tensor_scale > 0.0, tensor_scale, 1.0)
    tl.store(tensor_scale_ptr + tl.program_id(0), tensor_scale, mask=tl.program_id(0) == 0)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        # unit g holds columns 16 * unit ... 16 * unit + 15 of its row
        row = (tile // tiles * TR + g // TB).to(tl.int64)
        unit = tile % tiles * TB + g % TB

        # load: x (16, TR * TB), zero outside
        source = (x_ptr + row * stride_r + unit.to(tl.int64) * stride_c * 16)[None, :]
        j = tl.arange(0, 8)[:, None]
        inside = (row < rows)[None, :] & (unit[None, :] * 16 + j < columns)
        x0 = tl.load(source + j.to(tl.int64) * stride_c, mask=inside, other=0.0).to(tl.float32)
        inside = (row < rows)[None, :] & (unit[None, :] * 16 + (j + 8) < columns)
        x1 = tl.load(source + (j + 8).to(tl.int64) * stride_c, mask=inside, other=0.0).to(tl.float32)
        x = tl.reshape(tl.permute(tl.join(x0, x1), (2, 0, 1)), (16, TR * TB))

        # rotate: signs (fresh), 7 butterfly stages, 1/sqrt(128)
        x = x * sign
        x = tl.reshape(x, (16 * TR * TB,))
        x = butterfly(x, 1 * TR * TB)
        x = butterfly(x, 2 * TR * TB)
        x = butterfly(x, 4 * TR * TB)
        x = butterfly(x, 8 * TR * TB)
        x = butterfly(x, 1)
        x = butterfly(x, 2)
        x = butterfly(x, 4)
        x = tl.reshape(x, (16, TR * TB))
        x = x * 0.0883883461356163

        # amax of each block of 1 x 16: NaN stays NaN
        largest = tl.reduce(tl.abs(x), 0, larger)
        finite = largest < float("inf")
        block_max = tl.where(finite, largest, 0.0)

        # scales: nearest codes, the scale corrected by <y,y>/<y,yhat> (Quartet II 2601.22813, algorithm 1)
        s, _ = round_exmy(tl.div_rn(block_max, tensor_scale * 6.07210636138916), 3, 7, 448.0)
        divisor = s * tensor_scale
        value, code = round_e2m1(tl.where((divisor > 0.0)[None, :], divide(tl.abs(x), divisor), 0.0))
        code = code | (bits(x) >> 28) & 8
        projected = tl.reshape(tl.abs(x) * (value * s[None, :] * tensor_scale), (16 * TR * TB,))
        projected = add_halves(projected, 8 * TR * TB)
        projected = add_halves(projected, 4 * TR * TB)
        projected = add_halves(projected, 2 * TR * TB)
        projected = add_halves(projected, 1 * TR * TB)
        square = tl.reshape(x * x, (16 * TR * TB,))
        square = add_halves(square, 8 * TR * TB)
        square = add_halves(square, 4 * TR * TB)
        square = add_halves(square, 2 * TR * TB)
        square = add_halves(square, 1 * TR * TB)
        correction = tl.div_rn(square, projected)
        correction = tl.where((projected > 0.0) & (correction < float("inf")), correction, 1.0)
        word = any_words(row * units + unit, 2, seed, site.to(tl.uint32))
        s, scale_code = round_exmy_stochastic(s * correction, word, 3, 7, 448.0)
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
        tl.store(codes_ptr + row * units + unit, word, mask=(row < rows) & (unit < units))


kernel = fp4_bf16_hadamard_size_128_signs_fresh_bf16_no_nvfp4_rounding_ms_eden_packed_rows
