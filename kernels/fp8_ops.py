"""What ``lower_fp8`` makes of a GEMM: ``fp4::fp8_operand`` and ``fp4::fp8_mm`` of MXFP4 operands, ``fp4::fp8_block_mm`` of FP8.

On a device that is no GPU they are the oracle's functions (``fp4.runtime.fp8``, ``fp4.runtime.reference``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import fp8 as kernels
from fp4.kernels import fp8_blocks
from fp4.runtime import counters, fp8, ops, reference
from fp4.runtime.layout import Size, ceil_div

LIBRARY = torch.library.Library("fp4", "FRAGMENT")


def _fp8_operand(
    codes: Tensor, scales: Tensor, top: Tensor, quantizer: str, dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor]:
    q = ops.quantizer(quantizer)
    counter = counters.counter(name, codes.device)
    if codes.device.type == "cuda":
        return kernels.operand(codes, scales, top, q, dtype, counter)
    values, factor, outside = fp8.operand(codes, scales, top, q, dtype)
    counter += torch.stack([outside, outside.new_full((), values.numel())])
    return values.contiguous(), factor


def _fp8_operand_fake(
    codes: Tensor, scales: Tensor, top: Tensor, quantizer: str, dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor]:
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=dtype), codes.new_empty((), dtype=torch.float32)


def _fp8_mm(
    a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, alpha: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if a.device.type == "cuda":
        return kernels.mm(a, b, a_factor, b_factor, alpha, bias, dtype)
    return fp8.mm(a, b, a_factor, b_factor, alpha, bias, dtype)


def _fp8_mm_fake(a: Tensor, b: Tensor, a_factor: Any, b_factor: Any, alpha: Any, bias: Any, dtype: torch.dtype) -> Tensor:
    torch._check(
        a.shape[1] == b.shape[1], lambda: f"fp4::fp8_mm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; K is last in both"
    )
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _fp8_block_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_quantizer: str,
    b_quantizer: str,
    k: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product of FP8 codes by cuBLAS; of the decoded operands where the device or its CUDA has none, or one is empty."""
    qa, qb = ops.quantizer(a_quantizer), ops.quantizer(b_quantizer)
    if fp8_blocks.multiplies(a.device) and a.numel() and b.numel():
        return fp8_blocks.mm(a, a_scales, b, b_scales, (qa.block, qb.block), bias, dtype)
    first = reference.decode(a, a_scales, qa, k, torch.float32)
    second = reference.decode(b, b_scales, qb, k, torch.float32)
    return reference.mm(first, second, None, bias, dtype)


def _misfit(quantizer: str, codes: Tensor, k: Size) -> str:
    return f"fp4::fp8_block_mm: codes {tuple(codes.shape)} are not {quantizer} of {k} columns"


def _fp8_block_mm_fake(
    a: Tensor,
    a_scales: Any,
    b: Tensor,
    b_scales: Any,
    a_quantizer: str,
    b_quantizer: str,
    k: Size,
    bias: Any,
    dtype: torch.dtype,
) -> Tensor:
    if reason := fp8_blocks.no_product(ops.quantizer(a_quantizer), ops.quantizer(b_quantizer)):
        raise ValueError(f"fp4::fp8_block_mm: {reason}")
    for text, codes in ((a_quantizer, a), (b_quantizer, b)):
        torch._check(codes.shape[1] == ceil_div(k, 128) * 128, partial(_misfit, text, codes, k))
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _top_scale_fake(scales: Tensor) -> Tensor:
    return scales.new_empty((), dtype=torch.int32)


FUNCTIONS: dict[str, Callable[..., Any]] = {"fp8_operand": _fp8_operand, "fp8_mm": _fp8_mm, "fp8_block_mm": _fp8_block_mm}

for _name, _schema, _impl, _fake in (
    ("top_scale", "(Tensor scales) -> Tensor", fp8.top_scale, _top_scale_fake),
    (
        "fp8_operand",
        "(Tensor codes, Tensor scales, Tensor top, str quantizer, ScalarType dtype, str name) -> (Tensor, Tensor)",
        _fp8_operand,
        _fp8_operand_fake,
    ),
    (
        "fp8_mm",
        "(Tensor a, Tensor b, Tensor a_factor, Tensor b_factor, Tensor? alpha, Tensor? bias, ScalarType dtype) -> Tensor",
        _fp8_mm,
        _fp8_mm_fake,
    ),
    (
        "fp8_block_mm",
        "(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, str a_quantizer, str b_quantizer, SymInt k, Tensor? bias, "
        "ScalarType dtype) -> Tensor",
        _fp8_block_mm,
        _fp8_block_mm_fake,
    ),
):
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{_name}", _fake, lib=LIBRARY)
