"""Launching a generated kernel over an operand: a plan, made once for operands of a kind, and its launches.

A small layer's step waits for the host, so a launch does no more than look up its plan, allocate what it returns, and pass
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import autotune
from fp4.kernels.build import Bound, Output, Tiles, build
from fp4.kernels.codegen import source
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, fitted
from fp4.runtime.layout import ceil_div

SITES = ("site", "signs_site")
ALONG, FLAT = 1024, 4096  # columns: of most tiles along rows, and of a matrix that is taken for one of whole tiles
MOST_PLANS = 4096  # of dynamic shapes each has its own
PLANS: dict[Any, Any] = {}


def planned(kind: Any, method: str, tensors: Sequence[Tensor], about: tuple[Any, ...], how: tuple[Any, ...] = ()) -> Any:
    """``kind(tensors, *about).method(*how)``, made once for equal arguments.

    Tensors are equal here by dtype, shape, strides and device: what is made must depend on nothing else of them.
    """
    key = (kind, method, about, how, *[(t.dtype, t.shape, t.stride(), t.device) for t in tensors])
    found = PLANS.get(key)
    if found is None:
        found = getattr(kind(tensors, *about), method)(*how)
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
        PLANS[key] = found
    return found


class Plan:
    """The launches of one kernel over operands of one kind.

    rows, width: of what the kernel's tiles cover. inputs: names of the operand's tensors. numbers: the kernel's other
    arguments. seen: as `Bound`'s, of inputs. amax: the plan that computes the operand's own, if the kernel reads one. seeded:
    does it read a seed?
    """

    def __init__(
        self,
        spec: KernelSpec,
        target: Target,
        device: torch.device,
        size: tuple[int, int],
        inputs: Sequence[str],
        numbers: Mapping[str, int],
        outputs: Sequence[Output],
        seen: Mapping[str, torch.dtype],
        amax: Plan | None = None,
        seeded: bool = False,
    ) -> None:
        self.spec, self.target, self.device, self.size, self.numbers = spec, target, device, size, numbers
        self.amax, self.seeded = amax, seeded
        read = [*inputs, *(["amax_ptr"] if amax is not None else []), *(["seed_ptr"] if seeded else [])]
        self.names = [*read, *(o.name for o in outputs)]
        self.seen = {**seen, **{o.name: o.seen for o in outputs if o.seen is not None}}
        self.makers = [o.maker(device) for o in outputs]
        self.bound: Bound | None = None

    def __call__(
        self,
        tensors: Sequence[Tensor],
        amax: Tensor | None = None,
        seed: Tensor | None = None,
        site: int = 0,
        signs_site: int = 0,
    ) -> Any:
        """Launch on the current stream; returns the outputs, a list.

        tensors: the operand's, of the plan's kind. amax: FP32 of one element; computed where None and needed. seed: int64, of
        as many elements as the plan was made for. site, signs_site: of the draws.
        """
        read = self.read(tensors, amax, seed, signs_site)
        outputs = [make() for make in self.makers]
        given, sites = [*read, *outputs], (site, signs_site)
        (self.bound or self.bind(given, sites))(given, sites)
        return outputs

    def read(self, tensors: Sequence[Tensor], amax: Tensor | None, seed: Tensor | None, signs_site: int) -> list[Tensor]:
        """What the kernel reads, in its order, on the device."""
        read = [*tensors]
        if self.amax is not None:
            if amax is None:
                (amax,) = self.amax(tensors, None, seed, signs_site, signs_site)
            elif amax.dtype != torch.float32 or amax.device != self.device:
                amax = amax.to(self.device, torch.float32)
            read.append(amax)
        if self.seeded:
            assert seed is not None
            read.append(seed if seed.device == self.device else seed.to(self.device))
        return read

    def bind(self, given: Sequence[Tensor], sites: tuple[int, ...]) -> Bound:
        """The kernel with its usual or, autotuned, fastest tile; kept, but in a captured graph, where nothing is measured."""
        tuned, capturing = autotune.enabled() and self.device.type == "cuda", False
        tile = None
        if tuned and not (capturing := torch.cuda.is_current_stream_capturing()):
            from triton.testing import do_bench

            def seconds(candidate: Tile) -> float:
                run = partial(self.tiled(candidate), given, sites)
                return do_bench(run, warmup=5, rep=20, return_mode="median") / 1000

            tile = autotune.fastest(self.spec, self.target, torch.cuda.get_device_name(self.device), *self.size, seconds)
        bound = self.tiled(tile)
        if not capturing:
            self.bound = bound
        return bound

    def tiled(self, tile: Tile | None) -> Bound:
        """The kernel with a tile; the usual one for None."""
        return tiled(self.spec, self.target, self.device, self.size, self.names, self.numbers, self.seen, tile)


def flat(spec: KernelSpec, numbers: Mapping[str, int], width: int) -> Mapping[str, int]:
    """A kernel's numbers, or those of a matrix of the same elements in the same order whose rows are whole tiles.

    What a kernel writes, and draws, for a block depends on nothing but its place among all of them.
    """
    rows, columns, stride = numbers["rows"], numbers["columns"], numbers.get("stride_r")
    group = max(spec.block[1], spec.outer_units * spec.unit, spec.rotation_units * spec.unit)
    plain = spec.memory == "rows" and spec.block[0] == 1 and spec.scale_layout == "plain" and not spec.located
    dense = stride == columns == width and columns % group == 0 and FLAT % group == 0 and rows * columns % FLAT == 0
    if not plain or not dense or columns % ALONG == 0 or "kept_columns" in numbers:
        return numbers
    return {**numbers, "rows": rows * columns // FLAT, "columns": FLAT, "stride_r": FLAT}


def whole(spec: KernelSpec, tile: Tile, size: tuple[int, int], numbers: Mapping[str, int]) -> bool:
    """Does no tile reach beyond the operand, nor beyond what is written?"""
    rows, width = size
    columns = tile.units * spec.unit
    return (
        rows > 0
        and width > 0
        and rows % tile.rows == 0
        and width % columns == 0
        and numbers["columns"] == width == numbers.get("kept_columns", width)
    )


def tiled(
    spec: KernelSpec,
    target: Target,
    device: torch.device,
    size: tuple[int, int],
    names: Sequence[str],
    numbers: Mapping[str, int],
    seen: Mapping[str, torch.dtype],
    tile: Tile | None,
) -> Bound:
    """The kernel of `spec` over (rows, width) with a tile; arguments as `Bound`'s."""
    rows, width = size
    units = ceil_div(width, spec.block[1]) * spec.block_units
    tile = tile or fitted(spec, target, units)
    tiles = max(1, ceil_div(rows, tile.rows)) * max(1, ceil_div(units, tile.units))
    numbers = {**numbers, **tile.constants(whole(spec, tile, size, numbers))}
    return Bound(_kernel(spec, target), Tiles(tiles, tile.turns), device, names, SITES, numbers, seen, **tile.options)


@cache
def _kernel(spec: KernelSpec, target: Target) -> Any:
    return build(source(spec, target))


def launcher(
    spec: KernelSpec,
    target: Target,
    x: Tensor,
    width: int,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    pointers: Mapping[str, Any],
    tile: Tile | None = None,
) -> Callable[[], Any]:
    """Launches over x (R, C) of which nothing is kept, to measure a tile; each returns the compiled kernel.

    pointers: the kernel's other arguments by name, tensors of the dtype that it sees and integers, and those that override
    what follows from x.
    """
    numbers = {"rows": x.shape[0], "columns": x.shape[1], "stride_r": x.stride(0), "stride_c": x.stride(1)}
    numbers |= {name: value for name, value in pointers.items() if not isinstance(value, Tensor)}
    of_it = flat(spec, numbers, width)
    if of_it is not numbers:
        numbers, width = dict(of_it), of_it["columns"]
    tensors = {"x_ptr": x, "seed_ptr": seed, **pointers}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    bound = tiled(spec, target, x.device, (numbers["rows"], width), list(tensors), numbers, {}, tile)
    return partial(bound, list(tensors.values()), (site, signs_site))
