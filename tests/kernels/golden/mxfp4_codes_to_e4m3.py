"""mxfp4 -> fp32: values e4m3, rows together in memory, for sm_90.

A program takes TR rows x TB units of 16 columns. WHOLE: no tile reaches beyond the operand. Compile with build.COMPILE_OPTIONS.
"""

import triton
import triton.language as tl


@triton.jit
def floats(i):
    """The FP32 values of these 32 bits."""
    return i.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(code):
    """2^(code - 127) of codes 0..254."""
    return floats(tl.maximum(code << 23, 0x00400000))


@triton.jit
def element_value(code):
    """E2M1 codes (the upper four bits of int32) to FP32."""
    # As the exponent and mantissa of a float they are 2^126 times too small, subnormals included.
    return floats((code >> 6) & -0x7E400000) * 8.507059173023462e37


@triton.jit
def fp4_mxfp4_fp32_values_rows(packed_ptr, packed_scales_ptr, top_ptr, y_ptr, factor_ptr, outside_ptr, rows, columns, packed_stride, packed_scales_stride, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    top = tl.maximum(tl.load(top_ptr), 7)
    outside = tl.zeros((TR * TB,), tl.int32)
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

        # load: words of 8 codes, decoded to x (16, TR * TB), zero outside
        w = tl.arange(0, 2)[:, None]
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + w * 8 < columns)) | WHOLE
        words = tl.load(packed_ptr + (row * packed_stride + unit * 2)[None, :] + w, mask=inside, other=0)
        place = row * packed_scales_stride + unit * 16 // 32
        scale_code = tl.load(packed_scales_ptr + place, mask=((row < rows) & (unit * 16 < columns)) | WHOLE, other=0).to(tl.int32)
        exponent = scale_code - top + 6
        scale = tl.where(scale_code == 255, float("nan"), e8m0_value(tl.maximum(exponent + 127, 0)))
        nonzero = words | words >> 1 | words >> 2  # of magnitudes, a bit each
        nonzero = tl.where((exponent < -8)[None, :], nonzero & 0x11111111, 0)
        outside += tl.sum((nonzero * 0x11111111 >> 28) & 15, 0)
        x = element_value(words[:, None, :] << (28 - tl.arange(0, 8) * 4)[None, :, None]) * scale[None, None, :]
        x = tl.reshape(x, (16, TR * TB))

        # store
        x = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        j = tl.arange(0, 16)[:, None]
        target = y_ptr + (row * width + unit * 16)[None, :] + j
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + j < width)) | WHOLE
        tl.store(target, x, mask=inside)
        next_across = across + across_step
        wraps = next_across >= tiles
        next_down = down + down_step + wraps.to(tl.int32)
        next_across = next_across - tl.where(wraps, tiles, 0)
        down, across = next_down, next_across
    tl.store(factor_ptr + tl.program_id(0), e8m0_value(top - 6), mask=tl.program_id(0) == 0)
    count = tl.sum(outside, 0).to(tl.int64)
    tl.atomic_add(outside_ptr, count, mask=count > 0)
    elements = (tl.zeros((), tl.int64) + rows) * columns
    tl.atomic_add(outside_ptr + 1, elements, mask=tl.program_id(0) == 0)


kernel = fp4_mxfp4_fp32_values_rows
