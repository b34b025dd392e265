"""Launchers: the oracle's functions (``fp4.runtime.reference``) as one generated kernel each, on a CUDA device.

Operands are 2-D, (R, C), contracted dimension last, of any strides: a transposed, strided or expanded one is read where it
lies.
Kernels run on the current stream of the operand's device and read seeds there, so a replayed CUDA graph draws anew.
Results equal the oracle's bit for bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4.kernels.build import COMPILE_OPTIONS, build, require_triton
from fp4.kernels.codegen import source
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target, target_of
from fp4.kernels.tiles import Tile, tile_of
from fp4.runtime.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, Size, ceil_div
from fp4.runtime.rng import MASK
from fp4.runtime.spec import MXFP4, Quantizer, Rotation, SpecError

INPUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
OUTPUT = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


def quantize(
    x: Tensor,
    q: Quantizer,
    *,
    amax: Tensor | None = None,
    rotation: Rotation | None = None,
    seed: Tensor | None = None,
    site: int = 0,
    signs_site: int | None = None,
    swizzled: bool = False,
    native_draws: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and tensor scale, as ``reference.quantize(reference.rotate(x, ...), ...)`` returns them.

    x: (R, C), BF16, FP16 or FP32, on a CUDA device. amax: FP32 of one element, the (rotated) operand's; computed by a first
    kernel when None and needed. seed: one int64 element on the same device, or what ``rng.locate`` makes of it. site,
    signs_site: the draw sites of the rounding and of fresh signs; one site for both when signs_site is None. swizzled: block
    scales in the tensor cores' order, flat, one a row (``layout.swizzle`` of ``layout.row_scales``).
    native_draws: stochastic rounding by the GPU's own instruction, as ``reference.quantize(..., native_draws=True)``.

    Raises SpecError for a missing seed, TypeError for another dtype, TargetError for a device that cannot.
    """
    run = _Run(x, q, rotation, seed, site, signs_site)
    r, width = x.shape[0], run.width
    row_blocks, column_blocks = ceil_div(r, q.block[0]), ceil_div(width, q.block[1])
    bytes_per_row = column_blocks * (q.block[1] // 2 if q.packed else q.block[1])
    codes = x.new_empty((r, bytes_per_row), dtype=torch.uint8)
    if swizzled:
        size = ceil_div(r, TILE_ROWS) * ceil_div(column_blocks, TILE_COLUMNS) * TILE_BYTES
        scales = x.new_zeros((size,), dtype=torch.uint8)
    else:
        scale_dtype = torch.float32 if q.scale_format == "fp32" else torch.uint8
        scales = x.new_empty((row_blocks, column_blocks), dtype=scale_dtype)
    words = {16: torch.int64, 8: torch.int32}[min(16, q.block[1])] if q.packed else torch.uint8
    tensor_scale = run.tensor_scale()
    run(
        "packed",
        amax=amax,
        scale_layout="swizzled" if swizzled else "plain",
        native_draws=native_draws,
        codes_ptr=codes.view(-1).view(words),
        scales_ptr=scales,
        tensor_scale_ptr=tensor_scale,
    )
    return codes, scales, tensor_scale


def fake_quantize(
    x: Tensor,
    q: Quantizer,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scaled: bool = False,
    amax: Tensor | None = None,
    rotation: Rotation | None = None,
    seed: Tensor | None = None,
    site: int = 0,
    signs_site: int | None = None,
    native_draws: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decoded values (R, C or its padding by the rotation) and tensor scale; nothing is packed on the way.

    As ``reference.decode`` (``reference.dequantize`` if `scaled`) of what `quantize` returns. dtype: BF16 or FP32; or, for
    MXFP4 without `scaled`, E4M3 or E5M2, saturating where the value is out of range. The rest as `quantize`.
    """
    if dtype not in OUTPUT:
        raise TypeError(f"fake_quantize: dtype={dtype}; write one of {', '.join(str(d) for d in OUTPUT)}")
    run = _Run(x, q, rotation, seed, site, signs_site)
    y = x.new_empty((x.shape[0], run.width), dtype=dtype)
    tensor_scale = run.tensor_scale()
    stored = y.view(torch.uint8) if y.element_size() == 1 else y
    run(
        "decoded",
        amax=amax,
        dtype=OUTPUT[dtype],
        scaled=scaled,
        native_draws=native_draws,
        y_ptr=stored,
        tensor_scale_ptr=tensor_scale,
    )
    return y, tensor_scale


def amax(x: Tensor, *, rotation: Rotation | None = None, seed: Tensor | None = None, signs_site: int = 0) -> Tensor:
    """Largest finite magnitude of `x` (R, C), after the rotation if one is given: FP32, 0-d, as ``reference.amax``.

    A maximum has no order, so the result is the same at every run.
    """
    result = torch.zeros((), dtype=torch.float32, device=x.device)
    _Run(x, None, rotation, seed, signs_site, signs_site)("amax", amax_ptr=result.view(torch.int32))
    return result


def rotate(x: Tensor, rotation: Rotation, *, seed: Tensor | None = None, site: int = 0) -> Tensor:
    """x diag(signs) H_n / sqrt(n), as ``reference.rotate``: (R, C) to (R, C padded to n), BF16 or FP32 as the rotation says."""
    run = _Run(x, None, rotation, seed, site, site)
    y = x.new_empty((x.shape[0], run.width), dtype=torch.bfloat16 if rotation.bf16 else torch.float32)
    run("rotated", dtype=OUTPUT[y.dtype], y_ptr=y)
    return y


_amax = amax  # where a parameter has the name


class _Run:
    """One operand and what is done to it; called with an output, it launches the kernel."""

    def __init__(
        self, x: Tensor, q: Quantizer | None, rotation: Rotation | None, seed: Tensor | None, site: int, signs_site: int | None
    ) -> None:
        if x.dim() != 2:
            raise ValueError(f"x has {x.dim()} dimensions; flatten it to (rows, contracted dimension)")
        if x.dtype not in INPUT:
            raise TypeError(f"x is {x.dtype}; write x.float() for FP32, or pass bfloat16 or float16")
        require_triton()
        random = next((s for s in (q, rotation) if s is not None and s.needs_seed), None)
        if random is not None and seed is None:
            raise SpecError(f"{random} draws random numbers; pass seed, an int64 tensor of one element")
        self.x, self.q, self.rotation, self.seed = x, q, rotation, seed
        self.site, self.signs_site = site & MASK, (site if signs_site is None else signs_site) & MASK
        self.width = x.shape[1] if rotation is None else ceil_div(x.shape[1], rotation.size) * rotation.size
        self.target = target_of(x.device)

    def tensor_scale(self) -> Tensor:
        """Where the kernel writes the tensor scale or the outer scales, or the constant that it is."""
        q, device = self.q, self.x.device
        assert q is not None
        if q.has_outer_scale:
            return torch.empty((self.x.shape[0], ceil_div(self.width, q.outer)), dtype=torch.float32, device=device)
        if q.needs_amax:
            return torch.empty((), dtype=torch.float32, device=device)
        factor = 1.0
        if isinstance(q, MXFP4):
            factor = (3.0 if q.scale_rule == "range_fit" else 1.0) * q.prescale
        return torch.full((), 1.0 / factor, dtype=torch.float32, device=device)

    def __call__(
        self,
        output: str,
        *,
        amax: Tensor | None = None,
        dtype: str = "bf16",
        scaled: bool = False,
        scale_layout: str = "plain",
        native_draws: bool = False,
        **pointers: Tensor,
    ) -> None:
        x = self.x
        if self.q is not None and self.q.needs_amax:
            if amax is None:
                amax = _amax(x, rotation=self.rotation, seed=self.seed, signs_site=self.signs_site)
            pointers["amax_ptr"] = amax.to(device=x.device, dtype=torch.float32)
        located = self.q is not None and self.q.needs_seed and self.seed is not None and self.seed.numel() == 3
        spec = KernelSpec(
            self.q,
            self.rotation,
            output=output,
            dtype=dtype,
            scaled=scaled,
            memory="columns" if x.stride(0) == 1 and x.stride(1) != 1 and x.shape[1] > 1 else "rows",
            input=INPUT[x.dtype],
            aligned=self.width % 8 == 0,
            scale_layout=scale_layout,
            located=located,
            native_draws=native_draws,
        )
        launch(spec, self.target, x, self.width, self.seed, self.site, self.signs_site, pointers)


def launch(
    spec: KernelSpec,
    target: Target,
    x: Tensor,
    width: Size,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    pointers: dict[str, Tensor],
    tile: Tile | None = None,
) -> Any:
    """Run the kernel of `spec` over x (R, C) on the current stream. tile: other than the usual one."""
    kernel = _kernel(spec, target)
    tile = tile or tile_of(spec, target)
    units = ceil_div(width, spec.block[1]) * spec.block_units
    grid = (max(1, ceil_div(x.shape[0], tile.rows)) * max(1, ceil_div(units, tile.units)),)
    arguments: dict[str, Any] = {
        "x_ptr": x,
        "seed_ptr": None if seed is None else seed.to(x.device),
        "rows": x.shape[0],
        "columns": x.shape[1],
        "stride_r": x.stride(0),
        "stride_c": x.stride(1),
        "site": site,
        "signs_site": signs_site,
        "TR": tile.rows,
        "TB": tile.units,
        **pointers,
    }
    with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
        return kernel[grid](
            **{name: arguments[name] for name in kernel.arg_names},
            num_warps=tile.warps,
            **COMPILE_OPTIONS,
        )


@cache
def _kernel(spec: KernelSpec, target: Target) -> Any:
    return build(source(spec, target))
