"""A kernel is bound once for arguments of a kind: equal integers and alignments, whatever the draw sites and the values."""

from __future__ import annotations

from typing import Any

import torch

from fp4.kernels.build import COMPILE_OPTIONS, KINDS, Bound

CPU = torch.device("cpu")


class Compiled:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values: self.calls.append((grid, *values))


class Kernel:
    """What Triton's JITFunction is to a launch."""

    arg_names = ("x_ptr", "rows", "site", "N")

    def __init__(self) -> None:
        self.bindings: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def bind(**arguments: Any) -> Compiled:
            self.bindings.append(arguments)
            return Compiled(self.calls)

        return bind


def test_arguments_of_a_kind_are_bound_once() -> None:
    kernel = Kernel()
    bound = Bound(kernel, num_warps=2)
    memory = torch.zeros(64)

    def launch(x: torch.Tensor, rows: int, site: int) -> None:
        bound((3, 1, 1), CPU, {"x_ptr": x, "rows": rows, "site": site, "N": 8, "unused": 1})

    launch(memory, 16, 1)
    assert kernel.bindings == [{"x_ptr": memory, "rows": 16, "site": 1, "N": 8, "num_warps": 2, **COMPILE_OPTIONS}]
    assert kernel.calls == []
    other = torch.ones(64)
    launch(other, 16, 7)  # another tensor as aligned, another site
    assert len(kernel.bindings) == 1
    ((grid, x, *rest),) = kernel.calls
    assert (grid, rest) == ((3, 1, 1), [16, 7, 8])
    assert x is other
    launch(memory, 17, 1)
    launch(memory[1:], 16, 1)  # four bytes on: not aligned
    assert len(kernel.bindings) == 3
    assert len(kernel.calls) == 1


def test_kinds_do_not_pile_up() -> None:
    """Of dynamic shapes each is a kind."""
    kernel = Kernel()
    bound, x = Bound(kernel), torch.zeros(1)
    for rows in range(2 * KINDS + 1):
        bound((1, 1, 1), CPU, {"x_ptr": x, "rows": rows, "site": 0, "N": 8})
        assert len(bound.compiled) <= KINDS


def test_the_interpreter_compiles_nothing() -> None:
    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda **arguments: self.bindings.append(arguments)

    kernel = Interpreted()
    bound, x = Bound(kernel), torch.zeros(1)
    for _ in range(2):
        bound((1, 1, 1), CPU, {"x_ptr": x, "rows": 1, "site": 0, "N": 8})
    assert len(kernel.bindings) == 2
