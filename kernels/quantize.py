"""Launchers: the oracle's functions (``fp4.runtime.reference``) as one generated kernel each, on a CUDA device.

Operands are 2-D, (R, C), contracted dimension last, of any strides: a transposed, strided or expanded one is read where it
lies.
Kernels run on the current stream of the operand's device and read seeds there, so a replayed CUDA graph draws anew.
Results equal the oracle's bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import posthoc
from fp4.kernels.build import require_triton
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.launch import launch
from fp4.kernels.target import target_of
from fp4.runtime.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, ceil_div
from fp4.runtime.rng import MASK
from fp4.runtime.spec import NVFP4, Quantizer, Rotation, SpecError

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
    return Run(x, q, rotation, seed, site, signs_site).packed(amax, swizzled, native_draws)


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

    As ``reference.decode`` (``reference.dequantize`` if `scaled`) of what `quantize` returns. Outer scales, if `scaled`, are in
    the values alone, and the second result is FP32 of shape (0,). dtype: BF16 or FP32; or, for
    MXFP4 without `scaled`, E4M3 or E5M2, saturating where the value is out of range. The rest as `quantize`.
    """
    return Run(x, q, rotation, seed, site, signs_site).decoded(dtype, scaled, amax, native_draws)


def amax(x: Tensor, *, rotation: Rotation | None = None, seed: Tensor | None = None, signs_site: int = 0) -> Tensor:
    """Largest finite magnitude of `x` (R, C), after the rotation if one is given: FP32, 0-d, as ``reference.amax``.

    A maximum has no order, so the result is the same at every run.
    """
    return Run(x, None, rotation, seed, signs_site, signs_site).amax()


def rotate(x: Tensor, rotation: Rotation, *, seed: Tensor | None = None, site: int = 0) -> Tensor:
    """x diag(signs) H_n / sqrt(n), as ``reference.rotate``: (R, C) to (R, C padded to n), BF16 or FP32 as the rotation says."""
    return Run(x, None, rotation, seed, site, site).rotated()


class Run:
    """One operand (rows, columns) and what is done to it; each method launches a kernel and returns its results.

    `packed.PackedRun` is one whose operand is read from codes.
    """

    def __init__(
        self, x: Tensor, q: Quantizer | None, rotation: Rotation | None, seed: Tensor | None, site: int, signs_site: int | None
    ) -> None:
        if x.dim() != 2:
            raise ValueError(f"x has {x.dim()} dimensions; flatten it to (rows, contracted dimension)")
        if x.dtype not in INPUT:
            raise TypeError(f"x is {x.dtype}; write x.float() for FP32, or pass bfloat16 or float16")
        self.x = x
        self.prepare(x.shape[0], x.shape[1], q, rotation, seed, site, signs_site)

    def prepare(
        self,
        rows: int,
        columns: int,
        q: Quantizer | None,
        rotation: Rotation | None,
        seed: Tensor | None,
        site: int,
        signs_site: int | None,
    ) -> None:
        require_triton()
        random = next((s for s in (q, rotation) if s is not None and s.needs_seed), None)
        if random is not None and seed is None:
            raise SpecError(f"{random} draws random numbers; pass seed, an int64 tensor of one element")
        self.rows, self.columns, self.q, self.rotation, self.seed = rows, columns, q, rotation, seed
        self.site, self.signs_site = site & MASK, (site if signs_site is None else signs_site) & MASK
        self.width = columns if rotation is None else ceil_div(columns, rotation.size) * rotation.size
        self.target = target_of(self.x.device)

    def packed(self, amax: Tensor | None, swizzled: bool, native_draws: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, block scales, tensor scale."""
        q, device = self.q, self.x.device
        assert q is not None
        if isinstance(q, NVFP4) and q.posthoc:
            return posthoc.packed(self, swizzled)
        row_blocks, column_blocks = ceil_div(self.rows, q.block[0]), ceil_div(self.width, q.block[1])
        bytes_per_row = column_blocks * (q.block[1] // 2 if q.packed else q.block[1])
        codes = torch.empty((self.rows, bytes_per_row), dtype=torch.uint8, device=device)
        if swizzled:
            size = ceil_div(self.rows, TILE_ROWS) * ceil_div(column_blocks, TILE_COLUMNS) * TILE_BYTES
            scales = torch.zeros((size,), dtype=torch.uint8, device=device)
        else:
            scale_dtype = torch.float32 if q.scale_format == "fp32" else torch.uint8
            scales = torch.empty((row_blocks, column_blocks), dtype=scale_dtype, device=device)
        words = {16: torch.int64, 8: torch.int32}[min(16, q.block[1])] if q.packed else torch.uint8
        tensor_scale = self.tensor_scale()
        self(
            "packed",
            amax=amax,
            scale_layout="swizzled" if swizzled else "plain",
            native_draws=native_draws,
            codes_ptr=codes.view(-1).view(words),
            scales_ptr=scales,
            tensor_scale_ptr=tensor_scale,
        )
        return codes, scales, tensor_scale

    def decoded(
        self, dtype: torch.dtype, scaled: bool, amax: Tensor | None, native_draws: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Decoded values, tensor scale; shape (0,) in place of outer scales that are in the values."""
        assert self.q is not None
        if dtype not in OUTPUT:
            raise TypeError(f"fake_quantize: dtype={dtype}; write one of {', '.join(str(d) for d in OUTPUT)}")
        if isinstance(self.q, NVFP4) and self.q.posthoc:
            return posthoc.decoded(self, dtype, scaled)
        y = torch.empty((self.rows, self.width), dtype=dtype, device=self.x.device)
        absent = scaled and self.q.has_outer_scale
        tensor_scale = y.new_empty((0,), dtype=torch.float32) if absent else self.tensor_scale()
        stored = y.view(torch.uint8) if y.element_size() == 1 else y
        self(
            "decoded",
            amax=amax,
            dtype=OUTPUT[dtype],
            scaled=scaled,
            native_draws=native_draws,
            y_ptr=stored,
            tensor_scale_ptr=tensor_scale,
        )
        return y, tensor_scale

    def amax(self) -> Tensor:
        """The (rotated) operand's largest finite magnitude."""
        result = torch.zeros((), dtype=torch.float32, device=self.x.device)
        self("amax", amax_ptr=result.view(torch.int32))
        return result

    def rotated(self) -> Tensor:
        assert self.rotation is not None
        dtype = torch.bfloat16 if self.rotation.bf16 else torch.float32
        y = torch.empty((self.rows, self.width), dtype=dtype, device=self.x.device)
        self("rotated", dtype=OUTPUT[dtype], y_ptr=y)
        return y

    def tensor_scale(self) -> Tensor:
        """Where the kernel writes the tensor scale or the outer scales."""
        q, device = self.q, self.x.device
        assert q is not None
        if q.has_outer_scale:
            return torch.empty((self.rows, ceil_div(self.width, q.outer)), dtype=torch.float32, device=device)
        return torch.empty((), dtype=torch.float32, device=device)

    def __call__(self, output: str, *, amax: Tensor | None = None, **how: Any) -> None:
        """Launch the kernel of `output`. how: the specification's other fields, and pointers (``..._ptr``)."""
        quantizes = output in ("packed", "decoded")
        if quantizes and self.q is not None and self.q.needs_amax:
            how["amax_ptr"] = (self.amax() if amax is None else amax).to(device=self.x.device, dtype=torch.float32)
        fields = {name: value for name, value in how.items() if not name.endswith("_ptr")}
        pointers = {name: value for name, value in how.items() if name.endswith("_ptr")}
        spec = self.spec(
            quantizer=self.q if quantizes else None,
            rotation=self.rotation,
            output=output,
            aligned=self.width % 8 == 0,
            located=quantizes and self.q is not None and self.q.needs_seed and self.seed is not None and self.seed.numel() == 3,
            **fields,
        )
        self.launch(spec, pointers | self.read())

    def launch(self, spec: KernelSpec, pointers: dict[str, Any]) -> None:
        launch(spec, self.target, self.x, self.width, self.seed, self.site, self.signs_site, pointers)

    def spec(self, **fields: Any) -> KernelSpec:
        x = self.x
        columns = x.stride(0) == 1 and x.stride(1) != 1 and x.shape[1] > 1
        return specification(KernelSpec, memory="columns" if columns else "rows", input=INPUT[x.dtype], **fields)

    def read(self) -> dict[str, Any]:
        """Arguments of the kernel beyond those that follow from `x`: what it reads."""
        return {}


@cache
def specification(kind: Any, **fields: Any) -> Any:
    """One specification for equal fields: to make one checks it."""
    return kind(**fields)
