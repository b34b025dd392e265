"""bf16 -> hadamard[size=128,signs=fresh,bf16=no]: amax, rows together in memory, for sm_90.

A program takes TR rows x TB units of 16 columns. WHOLE: no tile reaches beyond the operand. Compile with build.COMPILE_OPTIONS.
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
def unpack_signed(x, sign):
    """BF16 to FP32, two at once, negative where `sign` (uint32) is 2^31: no more instructions than without signs."""
    return tl.inline_asm_elementwise(
        "mad.lo.u32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $4, 0x6A;",
        "=f,=f,r,r,r", [x, sign], dtype=tl.float32, is_pure=True, pack=2,
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
def last_butterfly(x, B: tl.constexpr):
    """The larger magnitude of what `butterfly` gives, |a| + |b|, in the place of both: abs after the shuffle costs nothing."""
    pairs = tl.reshape(x, (x.shape[0] // (2 * B), 2, B))
    pattern = pairs.to(tl.uint32, bitcast=True)
    partner = floats(tl.sum(pattern, 1, keep_dims=True).to(tl.uint32) - pattern)
    y = tl.inline_asm_elementwise(
        "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; add.rn.f32 $0, a, b; }",
        "=f,f,f", [pairs, partner], dtype=tl.float32, is_pure=True, pack=1,
    )
    return tl.reshape(y, (x.shape[0],))


@triton.jit
def carefully(finite, down, across, x_ptr, seed_ptr, rows, columns, stride_r, stride_c, signs_site, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    """The largest finite magnitude of one tile after all butterflies, or the one so far, as of `finite`."""
    width = tl.cdiv(columns, 128) * 128
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # of a row, numbered one after the other
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    seed = tl.load(seed_ptr).to(tl.uint32)
    sign = element_words(tl.arange(0, 32).to(tl.int64) * 4, 1, seed, signs_site.to(tl.uint32), 4) >> 31
    sign = tl.reshape(tl.trans(sign << 31), (8, 2, 8))  # of consecutive columns
    sign = tl.reshape(tl.permute(sign, (2, 0, 1)), (8, 8, 2))
    sign0, sign1 = tl.split(sign)
    sign0 = tl.reshape(tl.broadcast_to(sign0[:, None, :], (8, TR * TB // 8, 8)), (8, TR * TB))
    sign1 = tl.reshape(tl.broadcast_to(sign1[:, None, :], (8, TR * TB // 8, 8)), (8, TR * TB))
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
    x0 = unpack_signed(raw0, sign0)
    x1 = unpack_signed(raw1, sign1)
    x = tl.reshape(tl.permute(tl.join(x0, x1), (2, 0, 1)), (16, TR * TB))
    x = tl.reshape(x, (16 * TR * TB,))
    x = butterfly(x, 1 * TR * TB)
    x = butterfly(x, 2 * TR * TB)
    x = butterfly(x, 4 * TR * TB)
    x = butterfly(x, 8 * TR * TB)
    x = butterfly(x, 1)
    x = butterfly(x, 2)
    x = butterfly(x, 4)
    x = tl.reshape(x, (16, TR * TB))

    # the largest finite magnitude: integers have the same order; shifted, Inf and NaN wrap below all others
    i = (x.to(tl.uint32, bitcast=True) << 1) + (1 << 24)
    finite = tl.maximum(finite, tl.max(i, 0))
    return finite


@triton.jit(do_not_specialize=['signs_site'])
def fp4_bf16_hadamard_size_128_signs_fresh_bf16_no_amax_rows(x_ptr, seed_ptr, amax_ptr, rows, columns, stride_r, stride_c, signs_site, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    width = tl.cdiv(columns, 128) * 128
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # of a row, numbered one after the other
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    seed = tl.load(seed_ptr).to(tl.uint32)
    sign = element_words(tl.arange(0, 32).to(tl.int64) * 4, 1, seed, signs_site.to(tl.uint32), 4) >> 31
    sign = tl.reshape(tl.trans(sign << 31), (8, 2, 8))  # of consecutive columns
    sign = tl.reshape(tl.permute(sign, (2, 0, 1)), (8, 8, 2))
    sign0, sign1 = tl.split(sign)
    sign0 = tl.reshape(tl.broadcast_to(sign0[:, None, :], (8, TR * TB // 8, 8)), (8, TR * TB))
    sign1 = tl.reshape(tl.broadcast_to(sign1[:, None, :], (8, TR * TB // 8, 8)), (8, TR * TB))
    largest = tl.zeros((TR * TB,), tl.int32)
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
        x0 = unpack_signed(raw0, sign0)
        x1 = unpack_signed(raw1, sign1)
        x = tl.reshape(tl.permute(tl.join(x0, x1), (2, 0, 1)), (16, TR * TB))

        # rotate: signs (fresh), 6 butterfly stages, and of the last |a| + |b|
        x = tl.reshape(x, (16 * TR * TB,))
        x = butterfly(x, 1 * TR * TB)
        x = butterfly(x, 2 * TR * TB)
        x = butterfly(x, 4 * TR * TB)
        x = butterfly(x, 8 * TR * TB)
        x = butterfly(x, 1)
        x = butterfly(x, 2)
        x = tl.reshape(x, (16, TR * TB))
        x = tl.reshape(last_butterfly(tl.reshape(x, (16 * TR * TB,)), 4), (16, TR * TB))
        largest = tl.maximum(largest, tl.max(bits(x), 0))
        next_across = across + across_step
        wraps = next_across >= tiles
        next_down = down + down_step + wraps.to(tl.int32)
        next_across = next_across - tl.where(wraps, tiles, 0)
        down, across = next_down, next_across
    top = tl.max(largest, 0)
    largest = floats(top)
    PART: tl.constexpr = TB if TB < 8 else 8
    if top >= 0x7F800000:  # an Inf, a NaN or an overflow: anew, with every butterfly
        finite = tl.full((1 * PART,), 1 << 24, tl.uint32)
        down, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        down_step, across_step = tl.num_programs(0) // tiles, tl.num_programs(0) % tiles
        for tile in range(tl.program_id(0), total, tl.num_programs(0)):
            for part in range(TR // 1 * (TB // PART)):
                part_down = down * (TR // 1) + part // (TB // PART)
                part_across = across * (TB // PART) + part % (TB // PART)
                finite = carefully(finite, part_down, part_across, x_ptr, seed_ptr, rows, columns, stride_r, stride_c, signs_site, 1, PART, WHOLE)
            next_across = across + across_step
            wraps = next_across >= tiles
            next_down = down + down_step + wraps.to(tl.int32)
            next_across = next_across - tl.where(wraps, tiles, 0)
            down, across = next_down, next_across
        largest = floats(((tl.max(finite, 0) - (1 << 24)) >> 1).to(tl.int32))
    largest = largest * 0.0883883461356163
    tl.atomic_max(amax_ptr, bits(largest))


kernel = fp4_bf16_hadamard_size_128_signs_fresh_bf16_no_amax_rows
