"""Ops as Inductor's code calls them (compiler/direct_calls.py): past the dispatcher, by what the first call made of them.

A step of small layers waits for the host, and there an op's dispatch takes longer than its launch. The code that Inductor
generates has a function of its own for each call of an op; its tensors are of the same kind at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import fp8_ops, matmul_ops
from fp4.kernels.ops import KERNELS, KernelOp
from fp4.runtime import cublas, ops, reference

Call = Callable[..., Any]


def direct(name: str) -> Call:
    """``torch.ops.fp4.<name>``, for one place in the code. Returns what the op does, a list where that is a tuple."""
    bind, run = BINDERS[name], None

    def call(*arguments: Any) -> Any:
        nonlocal run
        if run is None:
            run = bind(*arguments)
        return run(*arguments)

    return call


def _kernel(op: KernelOp, *arguments: Any) -> Call:
    plan, given = op.plan(*arguments), op.given
    if op.single:
        return lambda *arguments: plan(*given(*arguments))[0]
    return lambda *arguments: plan(*given(*arguments))


def _product(a: Tensor, b: Tensor, alpha: Tensor | None = None) -> Call:
    as_they_are = reference.laid_out(a) is a and reference.laid_out(b) is b and a.numel() > 0 < b.numel()
    if not as_they_are or not reference.is_product(a, b, alpha, None, torch.bfloat16):
        return reference.product
    if alpha is None:
        return lambda a, b, alpha=None: reference.plain_product(a, b)
    scaled = cublas.ScaledProduct(a, b)

    def product(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
        made = scaled(a, b, alpha)
        return reference.scaled_sums(a, b, alpha, None, torch.bfloat16) if made is None else made

    return product


def _function(function: Call, *arguments: Any) -> Call:
    return function


BINDERS: dict[str, Callable[..., Call]] = {
    **{name: partial(_kernel, op) for name, op in KERNELS.items()},
    "product": _product,
    "seed": partial(_function, ops.draw_seed),
    **{name: partial(_function, call) for name, call in {**fp8_ops.FUNCTIONS, **matmul_ops.FUNCTIONS}.items()},
}
