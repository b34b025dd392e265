"""Products whose factor is on the device: cuBLASLt's matmul, alpha A B^T in FP32, rounded to BF16 once.

torch's products take their factor from the host, so a tensor scale costs an FP32 result that is written, read and written
again. cuBLAS itself reads the factor wherever it lies (CUBLASLT_POINTER_MODE_DEVICE; cuBLAS library documentation, section 3).
It is called by ctypes, in the library that torch has loaded. Split sums are added in FP32, never in place, so that equal
arguments give equal bits.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp4.runtime.allocate import maker

# Values of cublasLt.h.
FP32, BF16, COMPUTE_FP32 = 0, 14, 68
POINTER_MODE, TRANSPOSE_A, TRANSPOSE_B = 2, 3, 4
DEVICE_POINTERS = 1
MAX_WORKSPACE, REDUCTION_SCHEMES, ALIGNMENTS = 1, 3, (5, 6, 7, 8)
ADDED_IN_FP32 = 2
WORKSPACE = 32 << 20  # bytes, what torch gives it on Hopper
ALIGNED = 256  # bytes: what cuBLASLt can use, and any new tensor is


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


def scaled_product(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor | None:
    """alpha a b^T, BF16 (M, N), on the current stream; None where cuBLASLt has no algorithm for it.

    a: BF16 (M, K), b: BF16 (N, K), on one CUDA device, each contiguous or the transpose of a contiguous matrix, none empty.
    alpha: FP32 of one element on that device.
    """
    return ScaledProduct(a, b)(a, b, alpha)


class ScaledProduct:
    """`scaled_product` of matrices of one kind: of a's and b's shapes, device and order in memory."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.kind = (a.device, *a.shape, b.shape[0], _transposed(a), _transposed(b))

    def __call__(self, a: Tensor, b: Tensor, alpha: Tensor) -> Tensor | None:
        plan = _plan(*self.kind, _alignment(a.data_ptr()), _alignment(b.data_ptr()))
        return None if plan is None else plan(a, b, alpha)


_tried: dict[torch.device, bool] = {}


def available(device: torch.device) -> bool:
    """Can this device's products be scaled so? Tried once, on a small product, outside captured CUDA graphs; no where
    ``FP4_CUBLASLT=0`` is set."""
    if device.type != "cuda" or torch.version.cuda is None or os.environ.get("FP4_CUBLASLT") == "0":
        return False
    if device not in _tried:
        if torch.cuda.is_current_stream_capturing():
            return False
        _tried[device] = _try(device)
    return _tried[device]


def _try(device: torch.device) -> bool:
    try:
        # Asked in the middle of a compilation, with tensors that are real.
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cuda", enabled=False):
            values = torch.arange(96 * 64, device=device).remainder(7).sub(3).to(torch.bfloat16).view(96, 64)
            a, b, alpha = values[:32], values[32:], torch.full((), 0.37, dtype=torch.float32, device=device)
            exact = (a.float() @ b.float().t() * alpha).to(torch.bfloat16)
            found = scaled_product(a, b, alpha)
            return found is not None and torch.equal(found, exact)
    except (OSError, AttributeError, RuntimeError, ctypes.ArgumentError) as error:
        logging.getLogger(__name__).info("cuBLASLt is not called directly: %s", error)
        return False


def _transposed(x: Tensor) -> bool:
    """Is it the transpose of a contiguous matrix, and not contiguous itself?"""
    return not x.is_contiguous()


def _alignment(address: int) -> int:
    """The largest power of two up to `ALIGNED` that divides it."""
    return min(ALIGNED, address & -address)


@cache
def library() -> Any:
    """cuBLASLt, of the CUDA that torch was built for. Raises OSError where there is none."""
    assert torch.version.cuda is not None
    found = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    found.cublasLtMatrixLayoutCreate.argtypes = (c_void_p, c_int, c_uint64, c_uint64, c_int64)
    found.cublasLtMatmul.argtypes = (c_void_p,) * 14 + (c_size_t, c_void_p)
    return found


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} returned status {status}")


@cache
def _handle(index: int) -> tuple[c_void_p, Tensor]:
    """The device's handle, and a zero there: C's factor."""
    handle = c_void_p()
    with torch.cuda.device(index):
        _check(library().cublasLtCreate(byref(handle)), "cublasLtCreate")
    return handle, torch.zeros((), device=torch.device("cuda", index))


@cache
def _plan(
    device: torch.device, m: int, k: int, n: int, a_transposed: bool, b_transposed: bool, *alignments: int
) -> Plan | None:
    """Descriptors and algorithm of a kind of product, kept; None where there is no algorithm."""
    plan = Plan(device, m, k, n, a_transposed, b_transposed)
    return plan if plan.choose(*alignments) else None


class Plan:
    """One kind of product. cuBLAS reads matrices by columns: it makes y^T, (N, M), of b and a."""

    def __init__(self, device: torch.device, m: int, k: int, n: int, a_transposed: bool, b_transposed: bool) -> None:
        self.device, self.index, self.lib = device, device.index, library()
        self.handle, self.zero = _handle(self.index)
        self.beta = self.zero.data_ptr()
        self.operation = c_void_p()
        _check(self.lib.cublasLtMatmulDescCreate(byref(self.operation), COMPUTE_FP32, FP32), "cublasLtMatmulDescCreate")
        # By columns a contiguous b (N, K) is (K, N), to be transposed; the transpose of a contiguous matrix is (N, K) as it is.
        for attribute, value in (
            (POINTER_MODE, DEVICE_POINTERS),
            (TRANSPOSE_A, int(not b_transposed)),
            (TRANSPOSE_B, int(a_transposed)),
        ):
            given = c_int32(value)
            status = self.lib.cublasLtMatmulDescSetAttribute(self.operation, attribute, byref(given), c_size_t(sizeof(given)))
            _check(status, "cublasLtMatmulDescSetAttribute")
        self.first = self.layout(n, k) if b_transposed else self.layout(k, n)
        self.second = self.layout(m, k) if a_transposed else self.layout(k, m)
        self.result = self.layout(n, m)
        self.found = Algorithm()
        self.make = maker((m, n), torch.bfloat16, device)

    def layout(self, rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        _check(self.lib.cublasLtMatrixLayoutCreate(byref(made), BF16, rows, columns, rows), "cublasLtMatrixLayoutCreate")
        return made

    def choose(self, *alignments: int) -> bool:
        """Ask cuBLASLt for its first algorithm for a and b of these alignments, in bytes: is there one?"""
        lib, preference, count = self.lib, c_void_p(), c_int()
        _check(lib.cublasLtMatmulPreferenceCreate(byref(preference)), "cublasLtMatmulPreferenceCreate")
        a, b = alignments
        wanted: list[tuple[int, Any]] = [(MAX_WORKSPACE, c_uint64(WORKSPACE)), (REDUCTION_SCHEMES, c_uint32(ADDED_IN_FP32))]
        wanted += [(name, c_uint32(bytes_)) for name, bytes_ in zip(ALIGNMENTS, (b, a, ALIGNED, ALIGNED), strict=True)]
        for name, value in wanted:
            status = lib.cublasLtMatmulPreferenceSetAttribute(preference, name, byref(value), c_size_t(sizeof(value)))
            _check(status, "cublasLtMatmulPreferenceSetAttribute")
        layouts = (self.first, self.second, self.result, self.result)
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, *layouts, preference, 1, byref(self.found), byref(count)
        )
        lib.cublasLtMatmulPreferenceDestroy(preference)
        self.algorithm, self.size = byref(self.found), self.found.workspace
        self.make_workspace = maker((self.size,), torch.uint8, self.device)
        return bool(status == 0 and count.value and self.found.state == 0)

    def __call__(self, a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
        if self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self(a, b, alpha)
        y = self.make()
        workspace = self.make_workspace() if self.size else None
        address = y.data_ptr()  # as C, which a factor of 0 keeps from being read
        status = self.lib.cublasLtMatmul(
            self.handle,
            self.operation,
            alpha.data_ptr(),
            b.data_ptr(),
            self.first,
            a.data_ptr(),
            self.second,
            self.beta,
            address,
            self.result,
            address,
            self.result,
            self.algorithm,
            None if workspace is None else workspace.data_ptr(),
            self.size,
            torch._C._cuda_getCurrentRawStream(self.index),
        )
        _check(status, "cublasLtMatmul")
        return y
