"""FP8 codes with FP32 block scales multiplied by cuBLAS on Hopper: ``torch.nn.functional.scaled_mm``.

What torch asks for (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) and cuBLAS behind it: compute capability 9.0; cuBLAS 12.9;
E4M3 by E4M3; blocks of 1x128 by 1x128, 1x128 by 128x128 or the reverse; no fast accumulation; K and N multiples of 16, M of 4
(cuBLAS's own, torch does not look). The quantizer pads K to 128; rows are padded here. A bias is added after it, in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4.runtime.layout import pad_to
from fp4.runtime.spec import FP8, Quantizer

BLOCKS = ((1, 128), (128, 128))
M_MULTIPLE, N_MULTIPLE = 4, 16
SCALES_MULTIPLE = 4  # of the scales along K of a 128x128 block's row: L4 of cuBLAS's scaling factor layouts
CUDA = (12, 9)


def no_product(first: Quantizer | None, second: Quantizer | None) -> str:
    """Why ``scaled_mm`` does not multiply operands of these quantizers; empty where it does."""
    for q in (first, second):
        if not isinstance(q, FP8) or q.block not in BLOCKS:
            return f"{q or 'an operand that is not quantized'} is not FP8 in blocks of 1x128 or 128x128"
        if q.format != "e4m3":
            return f"{q}: torch multiplies block-scaled E4M3 by E4M3 only"
    assert first is not None
    assert second is not None
    return "cuBLAS does not multiply 128x128 by 128x128" if first.block == second.block == (128, 128) else ""


def new_enough() -> bool:
    """Was torch built with a CUDA whose cuBLAS multiplies these?"""
    version = torch.version.cuda
    return version is not None and tuple(map(int, version.split(".")[:2])) >= CUDA


def multiplies(device: torch.device) -> bool:
    """Does the device, with this torch, multiply FP8 with FP32 block scales?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and new_enough()


def arguments(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, blocks: tuple[tuple[int, ...], tuple[int, ...]]
) -> dict[str, Any]:
    """The operands' keyword arguments of ``scaled_mm``. blocks: of a and of b; the rest as `mm`."""
    given: dict[str, Any] = {}
    sides = (("a", a, a_scales, blocks[0], M_MULTIPLE), ("b", b, b_scales, blocks[1], N_MULTIPLE))
    for letter, codes, scales, block, multiple in sides:
        matrix = pad_to(codes, multiple, 1).view(torch.float8_e4m3fn)
        kind, scales = _scales(scales, block, multiple)
        given[f"mat_{letter}"] = matrix if letter == "a" else matrix.t()
        given[f"scale_{letter}"] = scales
        given[f"scale_recipe_{letter}"] = kind
    return given


def _scales(scales: Tensor, block: tuple[int, ...], multiple: int) -> tuple[Any, Tensor]:
    """Their kind, and the block scales (R/block[0], K/128) as cuBLAS reads them.

    1x128: (R, K/128), the rows contiguous, R padded. 128x128: (L4, R/128), K contiguous, L4 = K/128 padded.
    """
    kind = torch.nn.functional.ScalingType
    if block[0] == 1:
        return kind.BlockWise1x128, pad_to(scales.t(), 1, multiple).contiguous().t()
    return kind.BlockWise128x128, pad_to(scales, 1, SCALES_MULTIPLE).contiguous().t()


def mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    blocks: tuple[tuple[int, ...], tuple[int, ...]],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """a b^T + bias of decoded operands: sums of 128 products by FP8 tensor cores, scaled and added in FP32; (M, N) of `dtype`.

    a: uint8 (M, Kp) E4M3 codes, b: uint8 (N, Kp), none empty, Kp a multiple of 128; *_scales: FP32 (rows/block[0], Kp/128);
    blocks: of a and of b, a pair that `no_product` has nothing against. bias: (N,). For a device that `multiplies`.
    """
    output = dtype if bias is None and dtype == torch.bfloat16 else torch.float32
    y = torch.nn.functional.scaled_mm(**arguments(a, a_scales, b, b_scales, blocks), output_dtype=output)
    y = y[: a.shape[0], : b.shape[0]]
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype).contiguous()
