"""runtime/cublas.py against a cuBLASLt that is Python: it reads descriptors as the library's documentation says, and memory."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp4.runtime import cublas, reference

BF16 = torch.bfloat16


class Library:
    """cublasLt*: objects are numbered; a product is computed from addresses, by columns, C being all NaN if it were read."""

    def __init__(self) -> None:
        self.objects: dict[int, dict[Any, Any]] = {}
        self.algorithms = 1
        self.streams: list[int] = []

    def _make(self, into: Any, **what: Any) -> int:
        number = len(self.objects) + 1
        self.objects[number] = dict(what)
        into._obj.value = number
        return 0

    def _set(self, which: Any, attribute: int, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == size.value
        self.objects[which.value][attribute] = value._obj.value
        return 0

    def cublasLtMatmulDescCreate(self, into: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # sums, alpha and beta in FP32
        return self._make(into)

    def cublasLtMatrixLayoutCreate(self, into: Any, dtype: int, rows: int, columns: int, leading: int) -> int:
        assert dtype == 14  # BF16
        return self._make(into, shape=(rows, columns), leading=leading)

    def cublasLtMatmulPreferenceCreate(self, into: Any) -> int:
        return self._make(into)

    def cublasLtMatmulPreferenceDestroy(self, which: Any) -> int:
        self.preference = self.objects[which.value]
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> int:
        *_, wanted, found, count = given
        assert wanted == 1
        count._obj.value = self.algorithms
        found._obj.workspace = 64
        return 0 if self.algorithms else 15

    def _matrix(self, address: int, layout: Any) -> torch.Tensor:
        what = self.objects[layout.value]
        (rows, columns), leading = what["shape"], what["leading"]
        buffer = (ctypes.c_uint16 * (leading * columns)).from_address(address)
        return torch.frombuffer(buffer, dtype=BF16).view(columns, leading)[:, :rows].t()

    def cublasLtMatmul(self, _: Any, operation: Any, *given: Any) -> int:
        alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, _algorithm, workspace, size, stream = given
        how = self.objects[operation.value]
        assert how[2] == 1  # alpha and beta are read on the device
        factor, none = (torch.frombuffer((ctypes.c_float * 1).from_address(at), dtype=torch.float32) for at in (alpha, beta))
        assert none.item() == 0
        assert (c, c_layout.value) == (d, d_layout.value)
        assert workspace
        assert size == 64
        left, right = self._matrix(a, a_layout), self._matrix(b, b_layout)
        left, right = (x.t() if how[name] else x for x, name in ((left, 3), (right, 4)))
        self._matrix(d, d_layout).copy_((left.float() @ right.float() * factor).to(BF16))
        self.streams.append(stream)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(cublas, "library", lambda: found)
    monkeypatch.setattr(cublas, "_handle", lambda index: (ctypes.c_void_p(), torch.zeros(())))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    cublas._plan.cache_clear()
    yield found
    cublas._plan.cache_clear()


@pytest.mark.parametrize("shape", [(5, 7, 32), (64, 16, 48), (1, 3, 16), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("transposed", itertools.product((False, True), repeat=2), ids=str)
def test_every_layout(library: Library, shape: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    operands = []
    for rows, flip in zip((m, n), transposed, strict=True):
        x = torch.randn((k, rows) if flip else (rows, k), generator=generator).to(BF16)
        operands.append(x.t() if flip else x)
    a, b = operands
    alpha = torch.tensor(0.37)
    y = cublas.scaled_product(a, b, alpha)
    assert y is not None
    assert torch.equal(y, (a.float() @ b.float().t() * alpha).to(BF16))
    assert library.streams == [77]


def test_what_is_asked_of_an_algorithm(library: Library) -> None:
    """Sums of parts in FP32 and not in place; the alignment of each operand, cuBLAS's A being b."""
    x = torch.zeros(64 * 40, dtype=BF16)
    a, b = x[8 : 8 + 32 * 32].view(32, 32), x[2:1026].view(32, 32)
    cublas.scaled_product(a, b, torch.ones(()))
    asked = library.preference
    assert (asked[1], asked[3]) == (32 << 20, 2)
    assert (asked[5], asked[6]) == (cublas._alignment(b.data_ptr()), cublas._alignment(a.data_ptr()))
    assert asked[5] < asked[6]
    assert asked[7] == asked[8] == 256


def test_a_plan_is_made_once(library: Library) -> None:
    a = torch.ones(4, 16, dtype=BF16)
    for _ in range(3):
        cublas.scaled_product(a, a, torch.ones(()))
    assert len(library.streams) == 3
    assert len(library.objects) == 5  # an operation, three layouts, a preference


def test_without_an_algorithm_the_result_is_the_same(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.algorithms = 0
    a, b, alpha = torch.ones(4, 16, dtype=BF16), torch.ones(8, 16, dtype=BF16), torch.tensor(0.3)
    assert cublas.scaled_product(a, b, alpha) is None
    monkeypatch.setattr(reference, "is_product", lambda *given: True)
    assert torch.equal(reference.product(a, b, alpha), torch.full((4, 8), 4.8, dtype=BF16))
    assert library.streams == []


def test_a_failure_says_its_status(library: Library) -> None:
    library.cublasLtMatmul = lambda *given: 13  # type: ignore[method-assign]
    a = torch.ones(4, 16, dtype=BF16)
    with pytest.raises(RuntimeError, match="cublasLtMatmul returned status 13"):
        cublas.scaled_product(a, a, torch.ones(()))


def test_not_on_a_cpu() -> None:
    assert not cublas.available(torch.device("cpu"))


@pytest.mark.parametrize("error", [OSError("no such library"), RuntimeError("status 1")])
def test_a_device_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    asked = []

    def values(*given: Any, **named: Any) -> Any:
        asked.append(given)
        raise error

    device = torch.device("cuda", 5)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "arange", values)
    monkeypatch.setattr(cublas, "_tried", {})
    assert not cublas.available(device)
    assert not cublas.available(device)
    assert len(asked) == 1
