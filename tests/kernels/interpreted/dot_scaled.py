"""``tl.dot_scaled`` for Triton's interpreter: 3.7 fails on its arguments and has no arithmetic for it, 3.9 has, and reads E4M3
block scales as powers of two.

Decoded by the tables of ml_dtypes, not by the oracle; products and sums in FP32 by numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_BYTES = np.arange(256, dtype=np.uint8)
_TABLES = {
    "e2m1": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32),
    "e4m3": _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": _BYTES.view(ml_dtypes.float8_e5m2).astype(np.float32),
    "e8m0": _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32),
}


def decoded(codes: np.ndarray, kind: Any, scales: TensorHandle) -> np.ndarray:
    """Rows of codes (R, bytes) and of block scales (R, K / block) to FP32 values (R, K)."""
    name = {ir.ScaleDotElemTypeTY.E2M1: "e2m1", ir.ScaleDotElemTypeTY.E4M3: "e4m3", ir.ScaleDotElemTypeTY.E5M2: "e5m2"}[kind]
    codes = codes.view(np.uint8)
    if name == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    scale = _TABLES["e4m3" if scales.dtype.scalar == tl.float8e4nv else "e8m0"][scales.data.view(np.uint8)]
    return _TABLES[name][codes] * np.repeat(scale, codes.shape[1] // scale.shape[1], 1)


def create_dot_scaled(
    self: InterpreterBuilder,
    a: TensorHandle,
    a_scales: TensorHandle,
    a_kind: Any,
    b: TensorHandle,
    b_scales: TensorHandle,
    b_kind: Any,
    fast_math: bool,
    a_packed: bool,
    b_packed: bool,
    y: TensorHandle,
) -> TensorHandle:
    left, right = decoded(a.data, a_kind, a_scales), decoded(np.ascontiguousarray(b.data.T), b_kind, b_scales)
    return TensorHandle(y.data + left @ right.T, tl.float32)


_semantic_dot_scaled = TritonSemantic.dot_scaled


def semantic_dot_scaled(self: Any, *arguments: Any) -> Any:
    """The front end's, with formats given as strings, which is how the interpreter passes them."""
    return _semantic_dot_scaled(self, *(tl.constexpr(a) if isinstance(a, str) else a for a in arguments))


@contextmanager
def dot_scaled() -> Iterator[None]:
    with (
        mock.patch.object(InterpreterBuilder, "create_dot_scaled", create_dot_scaled, create=True),
        mock.patch.object(TritonSemantic, "dot_scaled", semantic_dot_scaled),
    ):
        yield
