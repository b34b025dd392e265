"""``fp4::fp8_operand`` and ``fp4::fp8_mm``: what ``lower_fp8`` makes of a GEMM of MXFP4 operands.

On a device that is no GPU they are the oracle's functions (``fp4.runtime.fp8``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4.runtime import counters, fp8, ops

LIBRARY = torch.library.Library("fp4", "FRAGMENT")


def _fp8_operand(
    codes: Tensor, scales: Tensor, top: Tensor, quantizer: str, dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor]:
    q = ops.quantizer(quantizer)
    counter = counters.counter(name, codes.device)
    if codes.device.type == "cuda":
        from fp4.kernels.fp8 import operand

        return operand(codes, scales, top, q, dtype, counter)
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
        from fp4.kernels.fp8 import mm

        return mm(a, b, a_factor, b_factor, alpha, bias, dtype)
    return fp8.mm(a, b, a_factor, b_factor, alpha, bias, dtype)


def _fp8_mm_fake(a: Tensor, b: Tensor, a_factor: Any, b_factor: Any, alpha: Any, bias: Any, dtype: torch.dtype) -> Tensor:
    torch._check(
        a.shape[1] == b.shape[1], lambda: f"fp4::fp8_mm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; K is last in both"
    )
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _top_scale_fake(scales: Tensor) -> Tensor:
    return scales.new_empty((), dtype=torch.int32)


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
):
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{_name}", _fake, lib=LIBRARY)
