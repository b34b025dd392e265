"""Launchers of `packed`'s kernels: quantize what a packed FP4 tensor decodes to, without decoding it to memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.packed import CODES, PackedSpec, readable
from fp4.kernels.quantize import Run, specification
from fp4.runtime.spec import Quantizer, Rotation, SpecError

DECODED = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Packed:
    """A packed matrix (rows, columns) as an operand: itself, or its transpose.

    codes: uint8 (rows, Cp/2). scales: uint8, as ``reference.quantize`` returns them. factor: None, or the tensor scale or the
    outer scales, FP32, where the decoded values are times them. source: what packed it. columns: those before padding.
    dtype: BF16 or FP32, what it decodes to. transposed: the operand is (columns, rows).

    Raises SpecError for a source that no kernel reads, TypeError for another dtype.
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor | None
    source: Quantizer
    columns: int
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = True

    def __post_init__(self) -> None:
        if not readable(self.source):
            raise SpecError(f"{self.source}: the kernels read packed E2M1 codes in blocks of a multiple of 16 columns")
        if self.dtype not in DECODED:
            raise TypeError(f"dtype={self.dtype}; codes decode to torch.bfloat16 or torch.float32")


class PackedRun(Run):
    """`Run` over the values of a packed matrix."""

    kind: Any = PackedSpec  # the class of its specifications

    def __init__(
        self,
        packed: Packed,
        q: Quantizer | None,
        rotation: Rotation | None = None,
        seed: Tensor | None = None,
        site: int = 0,
        signs_site: int | None = None,
    ) -> None:
        codes = packed.codes.contiguous()
        # Read as int32, so it must begin at one. Flat, since a matrix of no columns has strides that no wider dtype can view.
        words = (codes if codes.data_ptr() % 4 == 0 else codes.clone()).view(-1).view(torch.int32)
        self.x = words.view(codes.shape[0], codes.shape[1] // 4)
        self.operand = packed
        rows, columns = codes.shape[0], packed.columns
        if packed.transposed:
            rows, columns = columns, rows
        self.prepare(rows, columns, q, rotation, seed, site, signs_site)

    def spec(self, **fields: Any) -> KernelSpec:
        p = self.operand
        factor = "none" if p.factor is None else "outer" if p.source.has_outer_scale else "tensor"
        return specification(
            self.kind,
            source=p.source,
            factor=factor,
            input=DECODED[p.dtype],
            memory="columns" if p.transposed else "rows",
            ragged=p.columns % CODES != 0,
            **fields,
        )

    def read(self) -> dict[str, Any]:
        p = self.operand
        scales = p.scales.contiguous()
        found = {
            "rows": self.rows,
            "columns": self.columns,
            "packed_ptr": self.x,
            "packed_stride": self.x.shape[1],
            "packed_scales_ptr": scales,
            "packed_scales_stride": scales.shape[1],
        }
        if p.factor is not None:
            factor = p.factor.contiguous()
            found |= {"packed_factor_ptr": factor, "packed_factor_stride": factor.shape[1] if factor.dim() > 1 else 0}
        return found


def decode(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The decoded operand, rounded once more to `dtype`, BF16 or FP32, where that is not its own."""
    run = PackedRun(packed, None)
    y = torch.empty((run.rows, run.columns), dtype=dtype, device=run.x.device)
    run("values", dtype=DECODED[dtype], y_ptr=y)
    return y


def requantize(
    packed: Packed,
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
    """Codes, block scales and tensor scale of the decoded operand, as ``quantize.quantize`` of it returns them."""
    return PackedRun(packed, q, rotation, seed, site, signs_site).packed(amax, swizzled, native_draws)


def fake_requantize(
    packed: Packed,
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
    """Decoded values and tensor scale, as ``quantize.fake_quantize`` of the decoded operand returns them."""
    return PackedRun(packed, q, rotation, seed, site, signs_site).decoded(dtype, scaled, amax, native_draws)


def amax(packed: Packed, *, rotation: Rotation | None = None, seed: Tensor | None = None, signs_site: int = 0) -> Tensor:
    """Largest finite magnitude of the decoded (and rotated) operand: FP32, 0-d."""
    return PackedRun(packed, None, rotation, seed, signs_site, signs_site).amax()
