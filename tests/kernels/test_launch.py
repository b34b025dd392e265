"""A kernel is bound once for arguments of a kind: equal integers and alignments, whatever the draw sites and the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4.kernels.build import COMPILE_OPTIONS, KINDS, Bound
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import fitted, tile_of
from fp4.runtime.spec import NVFP4, Rotation

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


@pytest.mark.parametrize(("columns", "units"), [(4096, 128), (11008, 64), (2752, 16), (384, 16), (2048, 128), (160, 16)])
def test_a_tile_is_flatter_where_a_row_would_not_fill_it(columns: int, units: int) -> None:
    """As many elements and warps; 11008 columns are 5.4 tiles of 2048, and 10.75 of 1024."""
    spec, target = KernelSpec(NVFP4(), Rotation(16)), Target("sm_90")
    usual, tile = tile_of(spec, target), fitted(spec, target, columns // 16)
    assert tile.units == units
    assert (tile.rows * tile.units, tile.warps, tile.turns) == (usual.rows * usual.units, usual.warps, usual.turns)


def test_a_tile_is_as_wide_as_a_rotation() -> None:
    spec = KernelSpec(NVFP4(), Rotation(256, bf16=False))
    assert fitted(spec, Target("sm_90"), 16 * 3).units >= spec.rotation_units
    columns = KernelSpec(NVFP4(), memory="columns")
    assert fitted(columns, Target("sm_90"), 3) == tile_of(columns, Target("sm_90"))
