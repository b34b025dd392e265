"""MS-EDEN with post hoc range alignment (``NVFP4.posthoc``; Quartet II 2601.22813): the operand is read, and rotated, once.

The first pass is a kernel of `codegen` (or of `packed`) that writes the codes, each block's corrected scale in FP32, and their
maximum. The second touches only those scales: tensor scale = maximum / 256, then each over it, rounded stochastically to E4M3.
Decoded output is a third pass over codes and scales, half a byte an element read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4.kernels.build import Bound, Output, build
from fp4.kernels.helpers import HELPERS, used
from fp4.runtime.formats import E4M3_HEADROOM_MAX, E4M3_MAX, SCALE_FORMATS
from fp4.runtime.layout import ceil_div
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
    kernel.tree_sum("projected", f"{magnitude} * value")
    kernel.tree_sum("square", "x * x")
    kernel.add(
        "projected = projected * provisional",
        "correction = tl.div_rn(square, projected)",
        'correction = tl.where(correction < float("inf"), correction, 1.0)  # Inf or NaN of 0',
        "wide = provisional * correction  # 0 of a block that is not finite",
    )
    kernel.section("store: as integers, magnitudes have the same order")
    kernel.add(
        f"tl.atomic_max({kernel.pointer('wide_amax_ptr')}, tl.max({bits}(wide), 0))",
        f"place = {kernel.pointer('wide_ptr')} + row * units + unit",
        f"inside = {kernel.where('(row < rows) & (unit < units)')}",
        'tl.store(place, tl.where(finite, wide, float("nan")), mask=inside)',
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


class Packed:
    """The plan of codes, block scales and tensor scale, in two passes; called as a ``launch.Plan``."""

    def __init__(self, run: Run, swizzled: bool) -> None:
        q, (rows, width) = run.q, (run.rows, run.width)
        assert isinstance(q, NVFP4)
        units = ceil_div(width, q.block[1])
        wide = Output("wide_ptr", (rows, units), torch.float32)
        largest = Output("wide_amax_ptr", (), torch.float32, torch.int32, zero=True)
        self.first = run.plan("packed", [run.codes(), wide, largest])
        outputs = [run.scales(swizzled), Output("tensor_scale_ptr", (), torch.float32)]
        self.makers = [output.maker(run.device) for output in outputs]
        numbers = {"rows": rows, "units": units, "N": PER_PROGRAM, "FOURS": rows * units % 4 == 0}
        grid = (max(1, ceil_div(rows * units, PER_PROGRAM)),)
        names = ["wide_ptr", "wide_amax_ptr", "scales_ptr", "tensor_scale_ptr", "seed_ptr"]
        self.second = Bound(_second(q, swizzled, run.seeds == 3), grid, run.device, names, ["site"], numbers, {}, num_warps=4)

    def __call__(
        self, tensors: Sequence[Tensor], amax: Tensor | None, seed: Tensor | None, site: int, signs_site: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert seed is not None
        seed = seed.to(self.first.device)
        codes, wide, largest = self.first(tensors, None, seed, site, signs_site)
        scales, tensor_scale = (make() for make in self.makers)
        self.second([wide, largest, scales, tensor_scale, seed], (site,))
        return codes, scales, tensor_scale


@cache
def _second(q: NVFP4, swizzled: bool, located: bool) -> Any:
    return build(second_source(q, swizzled, located))


class Decoded:
    """The plan of decoded values and tensor scale, in three passes."""

    def __init__(self, run: Run, dtype: torch.dtype, scaled: bool) -> None:
        self.packed, self.dtype, self.scaled = Packed(run, False), dtype, scaled
        self.q, self.width = run.q, run.width

    def __call__(
        self, tensors: Sequence[Tensor], amax: Tensor | None, seed: Tensor | None, site: int, signs_site: int
    ) -> tuple[Tensor, Tensor]:
        from fp4.kernels import requantize

        assert self.q is not None
        codes, scales, tensor_scale = self.packed(tensors, amax, seed, site, signs_site)
        factor = tensor_scale if self.scaled else None
        operand = requantize.Packed(codes, scales, factor, self.q, self.width, torch.float32, transposed=False)
        return requantize.decode(operand, self.dtype), tensor_scale
