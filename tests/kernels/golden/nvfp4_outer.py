"""bf16 -> nvfp4[outer=128]: decoded bf16, tensor scale included, rows together in memory, for sm_90.

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
def group_max(x, N: tl.constexpr, B: tl.constexpr):
    """Flat x seen as (A, N, B): the largest of each N, flat."""
    return tl.reshape(tl.max(tl.reshape(x, (x.shape[0] // (N * B), N, B)), 1), (x.shape[0] // N,))


@triton.jit
def repeat(x, N: tl.constexpr, B: tl.constexpr):
    """Flat x seen as (A, 1, B), each N times: flat."""
    A: tl.constexpr = x.shape[0] // B
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (A, 1, B)), (A, N, B)), (x.shape[0] * N,))


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
def nearest_e2m1(a):
    """The values of `round_e2m1`, by two fma.rn.f32: an ulp of 2^22 m is E2M1's step at a, to which the first one rounds."""
    a = tl.minimum(a, 6.0)
    m = tl.maximum(a, 1.5)
    return tl.fma(m, 4194304.0, tl.fma(m, -4194304.0, a))


@triton.jit
def with_sign(magnitude, x):
    """The magnitude with the sign bit of x, -0.0 included."""
    return floats(bits(magnitude) | (bits(x) & -0x80000000))


@triton.jit
def fp4_bf16_nvfp4_outer_128_decoded_rows(x_ptr, y_ptr, rows, columns, stride_r, stride_c, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    width = columns
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # of a row, numbered one after the other
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
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
        i = bits(x) & 0x7FFFFFFF
        outer_max = group_max(tl.max(tl.where(i < 0x7F800000, i, 0), 0), 8, 1)
        tensor_max = floats(repeat(outer_max, 8, 1))
        encode = tl.where(tensor_max > 0.0, tl.minimum(tl.div_rn(2688.0, tensor_max), 3.4028234663852886e+38), 1.0)
        tensor_scale = tl.div_rn(1.0, encode)
        s, scale_code = round_e4m3(block_max * (encode * 0.1666666716337204))
        inverse = tl.minimum(inverse_of(s * tensor_scale), 3.4028234663852886e+38)
        value = nearest_e2m1(tl.abs(x * inverse[None, :]))
        scale_code = tl.where(finite, scale_code, 127)

        # store
        s = tl.where(finite, s, float("nan"))
        x = with_sign(value, x) * s[None, :]
        x = x * tensor_scale[None, :]
        x = x.to(tl.bfloat16)
        x_ = tl.permute(tl.reshape(x, (2, x.shape[0] // 2, TR * TB)), (1, 2, 0))
        x0, x1 = tl.split(x_)
        j = tl.arange(0, 8)[:, None]
        target = y_ptr + (row * width + unit * 16)[None, :] + j
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j < width)) | WHOLE
        tl.store(target, x0, mask=inside)
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j + 8 < width)) | WHOLE
        tl.store(target + 8, x1, mask=inside)
        next_across = across + across_step
        wraps = next_across >= tiles
        next_down = down + down_step + wraps.to(tl.int32)
        next_across = next_across - tl.where(wraps, tiles, 0)
        down, across = next_down, next_across


kernel = fp4_bf16_nvfp4_outer_128_decoded_rows
