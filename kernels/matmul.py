"""Launcher of the block-scaled matmul: packed codes and swizzled scales to a product, on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4.kernels import autotune
from fp4.kernels.build import COMPILE_OPTIONS, build
from fp4.kernels.matmul_codegen import reduce_source, source
from fp4.kernels.matmul_spec import FORMATS, Format, MatmulSpec, MatmulTile, tiles
from fp4.kernels.target import Target, TargetError, target_of
from fp4.runtime.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, ceil_div

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_STORED = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.uint8}
REDUCE_COLUMNS = 1024
# Steps of K that each part of split-K has at least: fewer, and filling the pipeline costs more than idle multiprocessors.
LEAST_STEPS = 8


def scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_format: str,
    b_format: str,
    *,
    alphas: Sequence[Tensor] = (),
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    accumulate: Tensor | None = None,
    tile: MatmulTile | None = None,
) -> Tensor:
    """alpha * a b^T + bias, FP32 accumulation, one rounding: (M, N) of `dtype`.

    a: uint8 codes (M, bytes), contracted dimension contiguous; b: (N, bytes). a_scales, b_scales: uint8, flat, one scale a row
    and block in the order of ``layout.swizzle``. Formats: names of ``matmul_spec.FORMATS``. alphas: FP32 of one element each,
    at most two, multiplied with each other first. bias: (N,). accumulate: FP32 (M, N), contiguous; the product is added to it
    in place and it is returned. tile: other than the one chosen.

    Raises ValueError for sizes that do not fit, TargetError for a device without the kernels.
    """
    spec = MatmulSpec(
        a_format,
        b_format,
        output=_NAMES[torch.float32 if accumulate is not None else dtype],
        alphas=len(alphas),
        bias=None if bias is None else _NAMES[bias.dtype],
        accumulate=accumulate is not None,
    )
    m, n = a.shape[0], b.shape[0]
    k = a.shape[1] * FORMATS[a_format].per_byte
    _check(a, a_scales, FORMATS[a_format], "a", k)
    _check(b, b_scales, FORMATS[b_format], "b", k)
    y = a.new_empty((m, n), dtype=dtype) if accumulate is None else accumulate
    if y.shape != (m, n) or not y.is_contiguous() or (accumulate is not None and y.dtype != torch.float32):
        raise ValueError(f"accumulate is {tuple(y.shape)} {y.dtype}; write a contiguous FP32 tensor of {(m, n)}")
    if m == 0 or n == 0:
        return y
    if k == 0:  # a descriptor of no columns does not exist
        row = torch.zeros((n,), dtype=torch.float32, device=a.device) if bias is None else bias
        return y.copy_(row.expand(m, n)) if accumulate is None else y.add_(row)
    run = _Run(spec, target_of(a.device), (a, b), (a_scales, b_scales), list(alphas), bias, y, k)
    run(run.chosen() if tile is None else tile)
    return y


def _check(codes: Tensor, scales: Tensor, form: Format, name: str, k: int) -> None:
    if codes.dim() != 2 or codes.dtype != torch.uint8 or not codes.is_contiguous():
        raise ValueError(f"{name} is {codes.dtype}, {codes.dim()}-D; write contiguous uint8 codes (rows, bytes)")
    if codes.shape[1] * form.per_byte != k:
        raise ValueError(f"{name} has {codes.shape[1] * form.per_byte} contracted elements, a has {k}")
    size = ceil_div(codes.shape[0], TILE_ROWS) * ceil_div(ceil_div(k, form.block), TILE_COLUMNS) * TILE_BYTES
    if scales.dtype != torch.uint8 or scales.numel() != size:
        raise ValueError(
            f"{name}'s scales are {scales.numel()} elements of {scales.dtype}; {codes.shape[0]} rows of {k} need {size} bytes, "
            "swizzled, one scale a row"
        )


class _Run:
    """One product; called with a tile, it launches the kernel."""

    def __init__(
        self,
        spec: MatmulSpec,
        target: Target,
        codes: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor],
        alphas: list[Tensor],
        bias: Tensor | None,
        y: Tensor,
        k: int,
    ) -> None:
        self.spec, self.target, self.scales, self.y, self.k = spec, target, scales, y, k
        self.tiles = tiles(spec, target)
        if not self.tiles:
            raise TargetError(
                f"no block-scaled matmul of {spec.a} by {spec.b} on {target.name}; decode the operands and use fp4::mm"
            )
        # A TMA descriptor's rows begin at multiples of 16 bytes.
        self.codes = [F.pad(c, (0, -c.shape[1] % 16)) if c.shape[1] % 16 else c for c in codes]
        self.epilogue = [*alphas, *([] if bias is None else [bias])]

    def chosen(self) -> MatmulTile:
        """The usual tile, or autotuned the fastest on this device for these sizes, measured once. A split K, which a
        measurement may choose, changes the order of the sums."""
        key = (self.spec, self.target, *self.y.shape, self.k)
        if autotune.enabled() and self.y.device.type == "cuda" and not self.spec.accumulate:
            if key not in _fastest and not torch.cuda.is_current_stream_capturing():
                _fastest[key] = self.fastest(_seconds)
            if key in _fastest:
                return _fastest[key]
        return self.usual()

    def usual(self) -> MatmulTile:
        m, n = self.y.shape
        return usual(self.spec, self.target, m, n, self.k, multiprocessors(self.y.device))

    def fastest(self, seconds: Callable[[Callable[[], Any]], float]) -> MatmulTile:
        """The candidate whose launch takes the least by the clock given; one that does not run is none."""
        times: dict[MatmulTile, float] = {}
        for tile in [*self.tiles, self.usual()]:
            with suppress(Exception):
                times[tile] = seconds(lambda tile=tile: self(tile))  # type: ignore[misc]
        return min(times, key=times.__getitem__) if times else self.usual()

    def __call__(self, tile: MatmulTile) -> None:
        spec, y = (self.spec.parts, None) if tile.split > 1 else (self.spec, self.y)
        m, n = self.y.shape
        if y is None:
            y = torch.empty((tile.split, m, n), dtype=torch.float32, device=self.y.device)
        programs = ceil_div(m, tile.m) * ceil_div(n, tile.n)
        if tile.persistent:
            programs = min(programs, multiprocessors(self.y.device))
        arguments = [*self.descriptors(tile), y, *(self.epilogue if tile.split == 1 else []), m, n, self.k, n]
        with torch.cuda.device(self.y.device) if self.y.device.type == "cuda" else nullcontext():
            _kernel(spec, self.target, replace(tile, split=1))[programs, tile.split](
                *arguments, num_warps=tile.warps, **COMPILE_OPTIONS
            )
            if tile.split > 1:
                _reduction(self.spec, self.target)[m, ceil_div(n, REDUCE_COLUMNS)](
                    y, self.y, *self.epilogue, tile.split, m * n, n, n, B=REDUCE_COLUMNS, num_warps=4, **COMPILE_OPTIONS
                )

    def descriptors(self, tile: MatmulTile) -> list[Any]:
        """a, its scales, b, its scales, as TMA reads them."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        found = []
        for codes, scales, name, rows in zip(
            self.codes, self.scales, (self.spec.a, self.spec.b), (tile.m, tile.n), strict=True
        ):
            f = FORMATS[name]
            found.append(TensorDescriptor.from_tensor(codes.view(_STORED[f.element]), [rows, tile.k // f.per_byte]))
            shape = (
                1,
                ceil_div(codes.shape[0], TILE_ROWS),
                ceil_div(ceil_div(self.k, f.block), TILE_COLUMNS),
                2,
                TILE_BYTES // 2,
            )
            block = [1, rows // TILE_ROWS, tile.k // (f.block * TILE_COLUMNS), 2, TILE_BYTES // 2]
            found.append(TensorDescriptor.from_tensor(scales.view(_STORED[f.scale]).view(shape), block))
        return found


def usual(spec: MatmulSpec, target: Target, m: int, n: int, k: int, processors: int) -> MatmulTile:
    """The largest tile that gives every multiprocessor one; a long K over few tiles of the result is split."""
    candidates = tiles(spec, target)

    def count(tile: MatmulTile) -> int:
        return -(-m // tile.m) * -(-n // tile.n)

    best = next((t for t in candidates if count(t) >= processors), max(candidates, key=count))
    plain = next((t for t in reversed(candidates) if not t.persistent and count(t) == count(best)), None)
    parts = min(processors // count(best), k // (LEAST_STEPS * best.k))
    return replace(plain, split=parts) if parts > 1 and plain is not None else best


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 3 for the interpreter, so that a persistent program takes several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


_fastest: dict[Any, MatmulTile] = {}


def _seconds(function: Callable[[], Any]) -> float:
    import triton

    return float(triton.testing.do_bench(function))


@cache
def _kernel(spec: MatmulSpec, target: Target, tile: MatmulTile) -> Any:
    return build(source(spec, target, tile))


@cache
def _reduction(spec: MatmulSpec, target: Target) -> Any:
    return build(reduce_source(spec, target))
