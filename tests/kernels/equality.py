"""Kernels against the oracle: what every test and the GPU benchmark compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fp4
from fp4.kernels import quantize as kernels
from fp4.passes.recipes import describe
from fp4.runtime import reference
from fp4.runtime.layout import row_scales, swizzle
from fp4.runtime.rounding import nan_code
from fp4.runtime.spec import Quantizer, Rotation
from tests.runtime.cases import same_bits


def equal_codes(got: Tensor, want: Tensor, scales: Tensor, q: Quantizer) -> bool:
    """Equal bytes, blocks with a NaN scale left out, whose codes mean nothing."""
    if got.shape != want.shape:
        return False
    dead = scales.isnan() if q.scale_format == "fp32" else scales == nan_code(q.scale_format)
    width = q.block[1] // 2 if q.packed else q.block[1]
    dead = dead.repeat_interleave(q.block[0], 0)[: got.shape[0]].repeat_interleave(width, 1)
    return bool(((got == want) | dead).all())


def supported(q: Quantizer) -> bool:
    return not q.outer & (q.outer - 1)


def recipe_operands() -> list[tuple[Quantizer, Rotation | None]]:
    """(quantizer, rotation) of every operand of every recipe and phase, each once."""
    found: dict[tuple[Quantizer, Rotation | None], None] = {}
    for name in fp4.recipes():
        policy = describe(name).policy
        for precision in (policy.precision, *(phase.precision for _, phase in policy.phases)):
            for gemm in precision.gemms().values():
                for operand in (gemm.first, gemm.second) if gemm is not None else ():
                    if operand.quantizer is not None:
                        found[operand.quantizer, gemm.rotation] = None
    return list(found)


def differences(
    x: Tensor,
    q: Quantizer,
    rotation: Rotation | None,
    seed: Tensor,
    site: int,
    amax: Tensor | None = None,
    oracle: Any = None,
    brief: bool = False,
    native_draws: bool = False,
) -> list[str]:
    """Which results of the kernels on `x` are not the oracle's. oracle: the device it runs on, that of x when None.

    brief: only the packed form, and the decoded one in BF16 with the tensor scale.
    """
    device = x.device if oracle is None else oracle
    x_, seed_ = x.to(device), seed.to(device)
    amax_ = None if amax is None else amax.to(device)
    rotated = x_ if rotation is None else reference.rotate(x_, rotation, seed_, site)
    want = reference.quantize(rotated, q, amax_, seed_, site, native_draws)
    columns = rotated.shape[1]
    given: dict[str, Any] = {"amax": amax, "rotation": rotation, "seed": seed, "site": site}
    drawn: dict[str, Any] = {"native_draws": native_draws}
    found = []

    def check(name: str, equal: bool) -> None:
        if not equal:
            found.append(name)

    codes, scales, tensor_scale = (t.to(device) for t in kernels.quantize(x, q, **given, **drawn))
    check("codes", equal_codes(codes, want[0], want[1], q))
    check("scales", same_bits(scales, want[1]))
    check("tensor scale", same_bits(tensor_scale, want[2]))
    if given["amax"] is None:
        largest = kernels.amax(x, rotation=rotation, seed=seed, signs_site=site)
        check("amax", same_bits(largest.to(device), reference.amax(rotated)))
        given["amax"] = largest
    for dtype, scaled in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True), (torch.float32, False)):
        made = kernels.fake_quantize(x, q, dtype=dtype, scaled=scaled, **given, **drawn)
        got, factor = (t.to(device) for t in made)
        inside = scaled and q.has_outer_scale
        check("tensor scale of decoded", factor.shape == (0,) if inside else same_bits(factor, want[2]))
        decode = reference.dequantize(*want, q, columns, dtype) if scaled else reference.decode(*want[:2], q, columns, dtype)
        check(f"decoded {dtype}{' scaled' if scaled else ''}", same_bits(got, decode))
        if brief:
            return found
    if rotation is not None:
        check("rotated", same_bits(kernels.rotate(x, rotation, seed=seed, site=site).to(device), rotated))
    if q.scale_format != "fp32":
        swizzled = kernels.quantize(x, q, swizzled=True, **given, **drawn)[1].to(device)
        check("swizzled scales", torch.equal(swizzled, swizzle(row_scales(want[1], x.shape[0], q.block[0]))))
    return found
