"""MS-EDEN with post hoc range alignment (``NVFP4.posthoc``; Quartet II 2601.22813): the operand is read, and rotated, once.

The first pass is a kernel of `codegen` (or of `packed`) that writes the codes, each block's corrected scale in FP32, and their
maximum. The second touches only those scales: tensor scale = maximum / 256, then each over it, rounded stochastically to E4M3.
Decoded output is a third pass over codes and scales, half a byte an element read.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4.kernels.build import Bound, build
from fp4.kernels.helpers import HELPERS, used
from fp4.runtime.formats import E4M3_HEADROOM_MAX, E4M3_MAX, SCALE_FORMATS
from fp4.runtime.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, ceil_div
from fp4.runtime.reference import POSTHOC_MASK
from fp4.runtime.rng import STREAM_SCALE
from fp4.runtime.rounding import nan_code
from fp4.runtime.spec import NVFP4

if TYPE_CHECKING:
    from fp4.kernels.codegen import Kernel
    from fp4.kernels.quantize import Run

PER_PROGRAM = 1024  # scales of a program of the second pass


def first_pass(kernel: Kernel, factor: str) -> None:
    """Lines of a kernel from `block_max` to the store of the corrected scales; `code` of each element. factor: a literal."""
    floats, bits = kernel.call("floats"), kernel.call("bits")
    kernel.section("codes by a provisional scale, corrected by <y,y>/<y,yhat> (Quartet II 2601.22813, post hoc alignment)")
    kernel.add(f"provisional = {floats}({bits}(tl.div_rn(block_max, {factor})) & {POSTHOC_MASK})")
    kernel.elements_of_quotient("provisional")
    magnitude = "x" if kernel.native else "tl.abs(x)"  # of the sign of `value`
    kernel.tree_sum("projected", f"{magnitude} * (value * {kernel.over('provisional')})")
    kernel.tree_sum("square", "x * x")
    kernel.add(
        "correction = tl.div_rn(square, projected)",
        'correction = tl.where((projected > 0.0) & (correction < float("inf")), correction, 1.0)',
        "wide = provisional * correction  # 0 of a block that is not finite",
    )
    kernel.section("store: as integers, magnitudes have the same order")
    kernel.add(
        f"tl.atomic_max({kernel.pointer('wide_amax_ptr')}, tl.max({bits}(wide), 0))",
        f"place = {kernel.pointer('wide_ptr')} + row * units + unit",
        'tl.store(place, tl.where(finite, wide, float("nan")), mask=(row < rows) & (unit < units))',
    )


def second_source(q: NVFP4, swizzled: bool, located: bool) -> str:
    """The text of the second pass: FP32 scales (rows, units) to bytes of the scale format, and the tensor scale."""
    _, mantissa, bias, top = SCALE_FORMATS[q.scale]
    flat = not located
    helpers = ["element_words" if flat else "any_words", "round_exmy_stochastic"]
    if flat:
        words = f"element_words(first, {STREAM_SCALE}, seed, site.to(tl.uint32), 4)"
        index = ""
    else:
        index = (
            f"    whole, corner = tl.load(seed_ptr + 1) // {q.block[1]}, tl.load(seed_ptr + 2) // {q.block[1]}\n"
            "    index = at // units * whole + corner + at % units\n"
        )
        words = f"any_words(index, {STREAM_SCALE}, seed, site.to(tl.uint32))"
    place = "at"
    swizzle = ""
    if swizzled:
        swizzle = (
            "    row, column = at // units, at % units\n"
            "    tile = row // 128 * tl.cdiv(units, 4) + column // 4\n"
            "    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4\n"
        )
        place = "place"
    functions = "\n\n\n".join(HELPERS[name] for name in used(helpers))
    kernel = f"""
@triton.jit(do_not_specialize=['site', 'rows'])
def fp4_posthoc_scales(
    wide_ptr, wide_amax_ptr, scales_ptr, tensor_scale_ptr, seed_ptr, rows, units, site, N: tl.constexpr, FOURS: tl.constexpr
):
    tensor_scale = tl.load(wide_amax_ptr) * {1 / (top * E4M3_HEADROOM_MAX / E4M3_MAX)!r}
    tensor_scale = tl.where(tensor_scale > 0.0, tensor_scale, 1.0)
    # four scales a thread at a time: one counter's words
    first = (tl.program_id(0).to(tl.int64) * (N // 4) + tl.arange(0, N // 4)) * 4
    at = first[None, :] + tl.arange(0, 4)[:, None]
    count = rows.to(tl.int64) * units
    if FOURS:  # the count is a multiple of four, so one bound is that of all four: they are read and written together
        inside = (first < count)[None, :] & (tl.arange(0, 4) < 4)[:, None]
    else:
        inside = at < count
    wide = tl.load(wide_ptr + at, mask=inside, other=0.0)
    seed = tl.load(seed_ptr).to(tl.uint32)
{index}    word = {words}
    scaled = tl.div_rn(wide, tl.zeros_like(wide) + tensor_scale)
    _, code = round_exmy_stochastic(scaled, word, {mantissa}, {bias}, {top!r})
    code = tl.where(wide == wide, code, {nan_code(q.scale)})
{swizzle}    tl.store(scales_ptr + {place}, code.to(tl.uint8), mask=inside)
    tl.store(tensor_scale_ptr + tl.program_id(0), tensor_scale, mask=tl.program_id(0) == 0)
""".strip("\n")
    head = f'"""{q}: tensor scale and block scales from the corrected scales."""\n\nimport triton\nimport triton.language as tl'
    return "\n\n\n".join((head, functions, kernel, "kernel = fp4_posthoc_scales")) + "\n"


def packed(run: Run, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and tensor scale of the run's operand, in two passes."""
    q, device = run.q, run.x.device
    assert isinstance(q, NVFP4)
    assert run.seed is not None
    units = ceil_div(run.width, q.block[1])
    codes = torch.empty((run.rows, units * q.block[1] // 2), dtype=torch.uint8, device=device)
    wide = torch.empty((run.rows, units), dtype=torch.float32, device=device)
    largest = torch.zeros((), dtype=torch.float32, device=device)
    run("packed", codes_ptr=codes.view(-1).view(torch.int64), wide_ptr=wide, wide_amax_ptr=largest.view(torch.int32))
    if swizzled:
        size = ceil_div(run.rows, TILE_ROWS) * ceil_div(units, TILE_COLUMNS) * TILE_BYTES
        scales = torch.zeros((size,), dtype=torch.uint8, device=device)
    else:
        scales = torch.empty((run.rows, units), dtype=torch.uint8, device=device)
    tensor_scale = torch.empty((), dtype=torch.float32, device=device)
    second_pass(q, wide, largest, scales, tensor_scale, run.seed, run.site, swizzled)
    return codes, scales, tensor_scale


def second_pass(
    q: NVFP4,
    wide: Tensor,
    largest: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    seed: Tensor,
    site: int,
    swizzled: bool = False,
) -> Any:
    """Launch the second pass: from `wide` (rows, units) FP32 and its maximum into `scales` and `tensor_scale`."""
    bound = _second(q, swizzled, seed.numel() == 3)
    rows, units = wide.shape
    arguments = {
        "wide_ptr": wide,
        "wide_amax_ptr": largest,
        "scales_ptr": scales,
        "tensor_scale_ptr": tensor_scale,
        "seed_ptr": seed.to(wide.device),
        "rows": rows,
        "units": units,
        "site": site,
        "N": PER_PROGRAM,
        "FOURS": rows * units % 4 == 0,
    }
    return bound((max(1, ceil_div(rows * units, PER_PROGRAM)),), wide.device, arguments)


@cache
def _second(q: NVFP4, swizzled: bool, located: bool) -> Bound:
    return Bound(build(second_source(q, swizzled, located)), num_warps=4)


def decoded(run: Run, dtype: torch.dtype, scaled: bool) -> tuple[Tensor, Tensor]:
    """Decoded values and tensor scale of the run's operand, in three passes."""
    from fp4.kernels.requantize import Packed, decode

    q = run.q
    assert q is not None
    codes, scales, tensor_scale = packed(run, False)
    factor = tensor_scale if scaled else None
    operand = Packed(codes, scales, factor, q, int(run.width), torch.float32, transposed=False)
    return decode(operand, dtype), tensor_scale
