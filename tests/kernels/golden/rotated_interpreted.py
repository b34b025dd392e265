"""bf16 -> hadamard[signs=fixed]: rotated bf16, rows together in memory, for interpreter.

A program takes TR rows x TB units of 16 columns. WHOLE: no tile reaches beyond the operand. Compile with build.COMPILE_OPTIONS.
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
def bits(x):
    """The bits of FP32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def round_bf16(x):
    """FP32 rounded to the nearest BF16, still FP32."""
    i = bits(x)
    return tl.where(tl.abs(x) < float("inf"), floats((i + 0x7FFF + ((i >> 16) & 1)) & -0x10000), x)


@triton.jit
def to_bf16(x):
    """FP32 to the nearest BF16, by its bits: the interpreter's own conversion truncates."""
    return (bits(round_bf16(x)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp4_bf16_hadamard_signs_fixed_rotated_rows(x_ptr, y_ptr, rows, columns, stride_r, stride_c, TR: tl.constexpr, TB: tl.constexpr, WHOLE: tl.constexpr):
    width = tl.cdiv(columns, 16) * 16
    units = tl.cdiv(width, 16)
    tiles = tl.maximum(tl.cdiv(units, TB), 1)  # of a row, numbered one after the other
    total = tl.maximum(tl.cdiv(rows, TR), 1) * tiles
    g = tl.arange(0, TR * TB)
    k = tl.arange(0, 16)[:, None]
    sign = (tl.full((1, 1), 0xd7e8, tl.uint32) >> (k).to(tl.uint32)) & 1
    sign = 1.0 - 2.0 * sign.to(tl.float32)
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
        x0 = tl.load(source + j.to(tl.int64) * stride_c, mask=inside, other=0.0)
        inside = ((row < rows)[None, :] & (unit[None, :] * 16 + (j + 8) < columns)) | WHOLE
        x1 = tl.load(source + (j + 8).to(tl.int64) * stride_c, mask=inside, other=0.0)
        x0 = x0.to(tl.float32)
        x1 = x1.to(tl.float32)
        x = tl.reshape(tl.permute(tl.join(x0, x1), (2, 0, 1)), (16, TR * TB))

        # rotate: signs (fixed), 4 butterfly stages, 1/sqrt(16)
        x = x * sign
        x = tl.reshape(x, (16 * TR * TB,))
        x = butterfly(x, 1 * TR * TB)
        x = butterfly(x, 2 * TR * TB)
        x = butterfly(x, 4 * TR * TB)
        x = butterfly(x, 8 * TR * TB)
        x = tl.reshape(x, (16, TR * TB))
        x = x * 0.25
        x = round_bf16(x)

        # store
        x = to_bf16(x)
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


kernel = fp4_bf16_hadamard_signs_fixed_rotated_rows
