"""bf16 -> nvfp4: decoded bf16, rows together in memory, for sm_120a.

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
def inverse_of(d):
    """1/d, rounded to the nearest: rcp.rn.f32, shorter than a division."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def e2m1x8(a, b, c, d, e, f, g, h):
    """Eight FP32 values to the codes of one word, the first lowest: four instructions."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 p<4>; cvt.rn.satfinite.e2m1x2.f32 p0, $2, $1; cvt.rn.satfinite.e2m1x2.f32 p1, $4, $3; cvt.rn.satfinite.e2m1x2.f32 p2, $6, $5; cvt.rn.satfinite.e2m1x2.f32 p3, $8, $7; mov.b32 $0, {p0, p1, p2, p3}; }",
        "=r,f,f,f,f,f,f,f,f",
        [a, b, c, d, e, f, g, h],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
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
def e2m1_codes(x):
    """FP32 (8, G) to E2M1, half to even, saturating: eight codes a word, row 0 lowest, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    return e2m1x8(a, b, c, d, e, f, g, h)


@triton.jit
def halves(x):
    """(16, G): rows 0 to 7 and rows 8 to 15."""
    return tl.split(tl.permute(tl.reshape(x, (2, 8, x.shape[1])), (1, 2, 0)))


@triton.jit
def e2m1x8_values(word):
    """The FP32 values of the eight codes of a word."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 p<4>; .reg .b32 v; .reg .b16 f, g; mov.b32 {p0, p1, p2, p3}, $8; cvt.rn.f16x2.e2m1x2 v, p0; mov.b32 {f, g}, v; cvt.f32.f16 $0, f; cvt.f32.f16 $1, g; cvt.rn.f16x2.e2m1x2 v, p1; mov.b32 {f, g}, v; cvt.f32.f16 $2, f; cvt.f32.f16 $3, g; cvt.rn.f16x2.e2m1x2 v, p2; mov.b32 {f, g}, v; cvt.f32.f16 $4, f; cvt.f32.f16 $5, g; cvt.rn.f16x2.e2m1x2 v, p3; mov.b32 {f, g}, v; cvt.f32.f16 $6, f; cvt.f32.f16 $7, g; }",
        "=f,=f,=f,=f,=f,=f,=f,=f,r",
        [word],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def stack8(a, b, c, d, e, f, g, h):
    """Eight (G,) as the rows of (8, G)."""
    low = tl.join(tl.join(a, b), tl.join(c, d))
    high = tl.join(tl.join(e, f), tl.join(g, h))
    return tl.reshape(tl.permute(tl.join(low, high), (3, 2, 1, 0)), (8, a.shape[0]))


@triton.jit
def e2m1_values(word):
    """Eight codes a word (G,) to FP32 (8, G)."""
    a, b, c, d, e, f, g, h = e2m1x8_values(word)
    return stack8(a, b, c, d, e, f, g, h)


@triton.jit
def unhalve(a, b):
    """Two (8, G) as one (16, G)."""
    return tl.reshape(tl.permute(tl.join(a, b), (2, 0, 1)), (16, a.shape[1]))


@triton.jit
def decoded_pairs(value, s):
    """value (U, G) FP32, of few bits, times s (G,): BF16, exact where it is a BF16 number; fma.rn.bf16x2, two at once."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 v, z; cvt.rn.bf16x2.f32 v, $2, $1; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, v, $3, z; }",
        "=r,f,f,r", [value, s.to(tl.bfloat16)[None, :]], dtype=tl.bfloat16, is_pure=True, pack=2,
    )


@triton.jit
def fp4_bf16_nvfp4_decoded_rows(x_ptr, amax_ptr, tensor_scale_ptr, y_ptr, rows, columns, stride_r, stride_c, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    width = columns
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # of a row, numbered one after the other
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    tensor_max = tl.load(amax_ptr)
    encode = tl.where(tensor_max > 0.0, tl.minimum(tl.div_rn(2688.0, tensor_max), 3.4028234663852886e+38), 1.0)
    tensor_scale = tl.div_rn(1.0, encode)
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
        inverse = tl.minimum(inverse_of(s * tensor_scale), 3.4028234663852886e+38)
        left, right = halves(x * inverse[None, :])
        low, high = e2m1_codes(left), e2m1_codes(right)
        value = unhalve(e2m1_values(low), e2m1_values(high))
        scale_code = tl.where(finite, scale_code, 127)

        # store
        s = tl.where(finite, s, float("nan"))
        value_ = tl.permute(tl.reshape(value, (2, value.shape[0] // 2, TR * TB)), (1, 2, 0))
        value0, value1 = tl.split(value_)
        y0 = decoded_pairs(value0, s)
        y1 = decoded_pairs(value1, s)
        j = tl.arange(0, 8)[:, None]
        target = y_ptr + (row * width + unit * 16)[None, :] + j
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j < width)) | WHOLE
        tl.store(target, y0, mask=inside)
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j + 8 < width)) | WHOLE
        tl.store(target + 8, y1, mask=inside)
        next_across = across + across_step
        wraps = next_across >= tiles
        next_down = down + down_step + wraps.to(tl.int32)
        next_across = next_across - tl.where(wraps, tiles, 0)
        down, across = next_down, next_across


kernel = fp4_bf16_nvfp4_decoded_rows
