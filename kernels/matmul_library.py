"""The second way to a block-scaled product: ``torch.nn.functional.scaled_mm`` (cuBLAS), on the same codes and scales.

A cross-check of the generated matmul, and a way out where Triton has none. Its limits: NVFP4 takes both tensor scales or none;
MXFP4 takes none, returns BF16 and ignores a bias; a bias is BF16 or FP16 and not added to FP32; K and N are multiples of 16 (K
of 32 for packed operands). What it does not take is done after it, with one more rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4.kernels.matmul_spec import FORMATS, format_of, no_format
from fp4.runtime.spec import Quantizer

_ELEMENTS = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
_PAIRS = (
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
    *((f"mxfp8_{a}", f"mxfp8_{b}") for a, b in (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))),
)


def no_product(a: Quantizer | None, b: Quantizer | None, dtype: torch.dtype = torch.bfloat16) -> str:
    """Why ``scaled_mm`` does not multiply operands of these quantizers to a result of `dtype`; empty where it does."""
    for q in (a, b):
        if reason := no_format(q):
            return reason
    assert a is not None
    assert b is not None
    if (format_of(a), format_of(b)) not in _PAIRS:
        return f"torch.nn.functional.scaled_mm does not multiply {format_of(a)} by {format_of(b)}"
    if format_of(a) == "mxfp4" and (a.has_tensor_scale or b.has_tensor_scale):
        return f"torch.nn.functional.scaled_mm of MXFP4 takes no factor, which {a} by {b} has"
    if format_of(a) == "mxfp4" and dtype == torch.float32:
        return "torch.nn.functional.scaled_mm of MXFP4 returns BF16, not FP32"
    return ""


def fits(a: Tensor, b: Tensor) -> bool:
    """Are the sizes those that the library takes? a: codes (M, bytes). b: codes (N, bytes)."""
    return a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0 and b.shape[0] % 16 == 0 and min(*a.shape, *b.shape) > 0


def arguments(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    names: tuple[str, str],
    alphas: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> tuple[dict[str, Any], Tensor | None, Tensor | None]:
    """The keyword arguments of ``scaled_mm``, and the factor and the bias that are left to do after it.

    a, b: uint8 codes; *_scales: uint8, flat, swizzled, one a row and block; names: of FORMATS. The rest as our ``scaled_mm``.
    """
    kind, swizzle = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    nvfp4, mxfp4 = names[0] == "nvfp4", names[0] == "mxfp4"
    block = kind.BlockWise1x16 if nvfp4 else kind.BlockWise1x32
    two_level = nvfp4 and None not in alphas
    given: dict[str, Any] = {}
    sides = (("a", a, a_scales, names[0], alphas[0]), ("b", b, b_scales, names[1], alphas[1]))
    for letter, codes, scales, name, alpha in sides:
        matrix = codes.view(_ELEMENTS[FORMATS[name].element])
        given[f"mat_{letter}"] = matrix if letter == "a" else matrix.t()
        outer = [alpha] if two_level else []
        given[f"scale_{letter}"] = [scales.view(_SCALES[FORMATS[name].scale]), *outer]
        given[f"scale_recipe_{letter}"] = [block, *([kind.TensorWise] if two_level else [])]
        given[f"swizzle_{letter}"] = [swizzle.SWIZZLE_32_4_4, *([swizzle.NO_SWIZZLE] if two_level else [])]
    left = [x for x in alphas if x is not None and not two_level]
    factor = left[0] if len(left) == 1 else left[0] * left[1] if left else None
    takes_bias = bias is not None and not mxfp4 and factor is None and bias.dtype == dtype != torch.float32
    given["bias"] = bias if takes_bias else None
    given["output_dtype"] = torch.bfloat16 if mxfp4 else torch.float32 if factor is not None else dtype
    return given, factor, None if takes_bias else bias


def scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    names: tuple[str, str],
    alphas: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """alpha * a b^T + bias by the library: (M, N) of `dtype`. Arguments as `arguments`."""
    given, factor, rest = arguments(a, a_scales, b, b_scales, names, alphas, bias, dtype)
    y = torch.nn.functional.scaled_mm(**given)
    if factor is not None:
        y = y * factor
    if rest is not None:
        y = y.float() + rest.float()
    return y.to(dtype)
