"""Launching a generated quantize kernel over an operand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import autotune
from fp4.kernels.build import Bound, build
from fp4.kernels.codegen import source
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, fitted
from fp4.runtime.layout import Size, ceil_div


def launch(
    spec: KernelSpec,
    target: Target,
    x: Tensor,
    width: Size,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    pointers: Mapping[str, Any],
    tile: Tile | None = None,
) -> Any:
    """Run the kernel of `spec` over x (R, C) on the current stream. tile: other than the usual, or the autotuned one.

    pointers: the kernel's other arguments by name, and those that override what follows from x.
    """
    arguments: dict[str, Any] = {
        "x_ptr": x,
        "seed_ptr": None if seed is None else seed.to(x.device),
        "rows": x.shape[0],
        "columns": x.shape[1],
        "stride_r": x.stride(0),
        "stride_c": x.stride(1),
        "site": site,
        "signs_site": signs_site,
        **pointers,
    }
    if tile is None and autotune.enabled() and x.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        from triton.testing import do_bench

        def seconds(candidate: Tile) -> float:
            run = partial(launch, spec, target, x, width, seed, site, signs_site, pointers, candidate)
            return do_bench(run, warmup=5, rep=20, return_mode="median") / 1000

        tile = autotune.fastest(spec, target, torch.cuda.get_device_name(x.device), int(arguments["rows"]), int(width), seconds)
    units = ceil_div(width, spec.block[1]) * spec.block_units
    tile = tile or _fitted(spec, target, int(units))
    arguments |= tile.constants
    tiles = max(1, ceil_div(arguments["rows"], tile.rows)) * max(1, ceil_div(units, tile.units))
    return _bound(spec, target, tile)((ceil_div(tiles, tile.turns),), x.device, arguments)


_fitted = lru_cache(fitted)


@cache
def _bound(spec: KernelSpec, target: Target, tile: Tile) -> Bound:
    return Bound(build(source(spec, target)), **tile.options)
