"""``fp4::scaled_mm``: what ``lower_blackwell`` makes of a GEMM whose operands the tensor cores multiply as they are.

On a device without such tensor cores it is the oracle's GEMM on the decoded operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import matmul_library as library
from fp4.kernels.matmul_library import fits
from fp4.kernels.matmul_spec import format_of, no_format
from fp4.runtime import ops, reference
from fp4.runtime.layout import Size, ceil_div, unswizzle
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4, Quantizer

LIBRARY = torch.library.Library("fp4", "FRAGMENT")
OPERANDS = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, str a_quantizer, str b_quantizer, SymInt k"
BLOCK_SCALED = (10, 12)  # major compute capabilities


def row_quantizer(q: Quantizer) -> Quantizer:
    """The quantizer that decodes the codes of `q` with one scale a row and block."""
    assert isinstance(q, NVFP4 | MXFP4 | MXFP8)
    if isinstance(q, MXFP8):
        return MXFP8(format=q.format)
    return dataclasses.replace(q, block=(1, q.block[1]), rounding="nearest")


def decoded(codes: Tensor, scales: Tensor, q: Quantizer, k: int) -> Tensor:
    """Codes and swizzled scales to BF16 values (R, k), exactly."""
    plain = unswizzle(scales, codes.shape[0], ceil_div(k, q.block[1]))
    return reference.decode(codes, plain, row_quantizer(q), k, torch.bfloat16)


def _on_block_scaled(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] in BLOCK_SCALED


def _scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_quantizer: str,
    b_quantizer: str,
    k: int,
    a_alpha: Tensor | None,
    b_alpha: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    qa, qb = ops.quantizer(a_quantizer), ops.quantizer(b_quantizer)
    alphas = [alpha for alpha in (a_alpha, b_alpha) if alpha is not None]
    if _on_block_scaled(a):
        from fp4.kernels.matmul import scaled_mm

        formats = str(format_of(qa)), str(format_of(qb))
        return scaled_mm(a, a_scales, b, b_scales, *formats, alphas=alphas, bias=bias, dtype=dtype)
    alpha = a_alpha * b_alpha if len(alphas) == 2 else alphas[0] if alphas else None  # type: ignore[operator]
    return reference.mm(decoded(a, a_scales, qa, k), decoded(b, b_scales, qb, k), alpha, bias, dtype)


def _library_scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_quantizer: str,
    b_quantizer: str,
    k: int,
    a_alpha: Tensor | None,
    b_alpha: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``_scaled_mm`` by cuBLAS; by the generated kernel where the sizes are none of the library's."""
    if _on_block_scaled(a) and fits(a, b):
        names = str(format_of(ops.quantizer(a_quantizer))), str(format_of(ops.quantizer(b_quantizer)))
        return library.scaled_mm(a, a_scales, b, b_scales, names, (a_alpha, b_alpha), bias, dtype)
    return _scaled_mm(a, a_scales, b, b_scales, a_quantizer, b_quantizer, k, a_alpha, b_alpha, bias, dtype)


def _misfit(quantizer: str, codes: Tensor, k: Size) -> str:
    return f"fp4::scaled_mm: codes {tuple(codes.shape)} are not {quantizer} of {k} columns"


def _scaled_mm_fake(
    a: Tensor, a_scales: Any, b: Tensor, b_scales: Any, a_quantizer: str, b_quantizer: str, k: Size, *epilogue: Any
) -> Tensor:
    for text, codes in ((a_quantizer, a), (b_quantizer, b)):
        q = ops.quantizer(text)
        if reason := no_format(q):
            raise ValueError(f"fp4::scaled_mm: {reason}")
        width = ceil_div(k, q.block[1]) * (q.block[1] // 2 if q.packed else q.block[1])
        torch._check(codes.shape[1] == width, partial(_misfit, text, codes, k))
    return a.new_empty((a.shape[0], b.shape[0]), dtype=epilogue[-1])


FUNCTIONS: dict[str, Callable[..., Any]] = {"scaled_mm": _scaled_mm, "library_scaled_mm": _library_scaled_mm}

for _name, _impl in FUNCTIONS.items():
    LIBRARY.define(f"{_name}({OPERANDS}, Tensor? a_alpha, Tensor? b_alpha, Tensor? bias, ScalarType dtype) -> Tensor")
    LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{_name}", _scaled_mm_fake, lib=LIBRARY)
