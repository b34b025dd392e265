"""Kernels that read codes against the oracle: what the tests and the GPU benchmark compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4.kernels import requantize as kernels
from fp4.runtime import reference
from fp4.runtime.layout import row_scales, swizzle
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation
from tests.kernels.equality import equal_codes
from tests.runtime.cases import same_bits

# (what forward packs, the backward's quantizer and rotation): those of Quartet II and Quartet, then one of each part.
RECIPES: tuple[tuple[Quantizer, Quantizer, Rotation | None], ...] = (
    (NVFP4(four_six=True), NVFP4(rounding="ms_eden"), Rotation(128, signs="fresh", bf16=False)),
    (MXFP4(scale_rule="quest"), MXFP4(scale_rule="range_fit"), Rotation(32, signs="fresh", bf16=False)),
)
CASES: tuple[tuple[Quantizer, Quantizer, Rotation | None], ...] = (
    *RECIPES,
    (NVFP4(four_six=True), NVFP4(rounding="ms_eden", posthoc=True), Rotation(128, signs="fresh", bf16=False)),
    (NVFP4(), NVFP4(), None),
    (NVFP4(), NVFP4(rounding="stochastic", range_guard=True), Rotation(16, signs="fixed")),
    (NVFP4(block=(16, 16)), NVFP4(block=(16, 16)), None),
    (NVFP4(block=(1, 32)), MXFP4(block=(32, 32)), Rotation(64)),
    (NVFP4(outer=128), NVFP4(rounding="stochastic"), Rotation(256, bf16=False)),
    (NVFP4(scale="e1m6"), NVFP4(outer=128), None),
    (NVFP4(scale="ue5m3"), NVFP4(four_six=True), Rotation(32, signs="fresh")),
    (MXFP4(block=(32, 32), scale_rule="ceil"), MXFP4(scale_rule="range_fit", rounding="stochastic"), None),
    (MXFP4(), MXFP4(prescale=0.75, rounding="stochastic"), Rotation(128, signs="fresh", bf16=False)),
)


def differences(
    x: Tensor,
    source: Quantizer,
    q: Quantizer,
    rotation: Rotation | None,
    seed: Tensor,
    site: int,
    *,
    transposed: bool = True,
    scaled: bool = False,
    device: str = "cpu",
    brief: bool = False,
    native_draws: bool = False,
) -> list[str]:
    """Which results of the kernels on codes of `x` (R, C) are not the oracle's.

    The oracle quantizes, decodes, transposes, rotates and quantizes on the CPU; the kernels, on `device`, read its codes.
    transposed: the operand is (C, R). scaled: it is decoded with its tensor scale. brief: the packed form and amax alone.
    """
    dtype = torch.bfloat16 if source.exact_in_bf16 else torch.float32
    codes, scales, factor = reference.quantize(x, source, None, seed, site + 100)
    columns = x.shape[1]
    if scaled or source.has_outer_scale:
        decoded = reference.dequantize(codes, scales, factor, source, columns, dtype)
    else:
        decoded = reference.decode(codes, scales, source, columns, dtype)
    operand = decoded.t() if transposed else decoded
    rotated = operand if rotation is None else reference.rotate(operand, rotation, seed, site + 1)
    want = reference.quantize(rotated, q, None, seed, site, native_draws)

    given = factor.to(device) if scaled or source.has_outer_scale else None
    packed = kernels.Packed(codes.to(device), scales.to(device), given, source, columns, dtype, transposed)
    draws: dict[str, Any] = {"rotation": rotation, "seed": seed.to(device), "signs_site": site + 1}
    found = []

    def check(name: str, equal: bool) -> None:
        if not equal:
            found.append(name)

    got = [t.cpu() for t in kernels.requantize(packed, q, site=site, native_draws=native_draws, **draws)]
    check("codes", equal_codes(got[0], want[0], want[1], q))
    check("scales", same_bits(got[1], want[1]))
    check("tensor scale", same_bits(got[2], want[2]))
    amax = kernels.amax(packed, **draws)
    check("amax", same_bits(amax.cpu(), reference.amax(rotated)))
    if brief:
        return found
    for out, times in ((torch.bfloat16, False), (torch.float32, True)):
        how: dict[str, Any] = {"dtype": out, "scaled": times, "amax": amax, "site": site, "native_draws": native_draws}
        got_values, got_factor = (t.cpu() for t in kernels.fake_requantize(packed, q, **how, **draws))
        inside = times and q.has_outer_scale
        check("tensor scale of decoded", got_factor.shape == (0,) if inside else same_bits(got_factor, want[2]))
        width = rotated.shape[1]
        decode = reference.dequantize(*want, q, width, out) if times else reference.decode(*want[:2], q, width, out)
        check(f"decoded {out}{' scaled' if times else ''}", same_bits(got_values, decode))
    if q.scale_format != "fp32":
        swizzled = kernels.requantize(packed, q, site=site, amax=amax, swizzled=True, **draws)[1].cpu()
        check("swizzled scales", torch.equal(swizzled, swizzle(row_scales(want[1], rotated.shape[0], q.block[0]))))
    return found
