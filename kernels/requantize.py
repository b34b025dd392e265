"""Launchers of `packed`'s kernels: quantize what a packed FP4 tensor decodes to, without decoding it to memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.launch import Plan, planned
from fp4.kernels.packed import CODES, PackedSpec, readable
from fp4.kernels.quantize import Run, draws
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

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a kernel reads."""
        return readable_tensors(self.codes, self.scales, self.factor)


class PackedRun(Run):
    """`Run` over the values of a packed matrix: of its codes, scales and, where it has one, factor."""

    kind: type[PackedSpec] = PackedSpec
    inputs: tuple[str, ...] = ("packed_ptr", "packed_scales_ptr", "packed_factor_ptr")
    seen = {"packed_ptr": torch.int32}  # noqa: RUF012

    def __init__(
        self,
        tensors: Sequence[Tensor],
        source: Quantizer,
        columns: int,
        dtype: torch.dtype,
        transposed: bool,
        q: Quantizer | None,
        rotation: Rotation | None,
        seeds: int | None,
    ) -> None:
        codes, scales, *factor = tensors
        if any(t.device != codes.device for t in tensors):
            raise ValueError(f"codes on {codes.device}, what decodes them on {[str(t.device) for t in tensors[1:]]}; move them")
        self.inputs = self.inputs[: len(tensors)]
        self.fields = {
            "source": source,
            "factor": "none" if not factor else "outer" if source.has_outer_scale else "tensor",
            "input": DECODED[dtype],
            "memory": "columns" if transposed else "rows",
            "ragged": columns % CODES != 0,
        }
        rows = codes.shape[0]
        self.numbers = {
            "rows": columns if transposed else rows,
            "columns": rows if transposed else columns,
            "packed_stride": codes.shape[1] // 4,
            "packed_scales_stride": scales.shape[1],
            "packed_factor_stride": factor[0].shape[1] if factor and factor[0].dim() > 1 else 0,
        }
        self.prepare(codes.device, q, rotation, seeds)

    def spec(self, **fields: Any) -> KernelSpec:
        return self.kind(**fields)

    def read_values(self, dtype: torch.dtype) -> Plan:
        """The values themselves, as `dtype`."""
        return self.plan("values", [self.values(dtype, self.numbers["columns"])], dtype=DECODED[dtype])


def plan(
    method: str,
    packed: Packed,
    how: tuple[Any, ...] = (),
    q: Quantizer | None = None,
    rotation: Rotation | None = None,
    seed: Tensor | None = None,
) -> Any:
    """The plan of a method of `PackedRun`; called with (`readable_tensors`, amax, seed, site, signs_site)."""
    about = (packed.source, packed.columns, packed.dtype, packed.transposed, q, rotation, draws(seed))
    return planned(PackedRun, method, packed.tensors, about, how)


def readable_tensors(codes: Tensor, scales: Tensor, factor: Tensor | None) -> tuple[Tensor, ...]:
    """As the kernels read them: contiguous, and codes, which are read as int32, begin at one."""
    codes, scales = codes.contiguous(), scales.contiguous()
    if codes.data_ptr() % 4:
        codes = codes.clone()
    return (codes, scales) if factor is None else (codes, scales, factor.contiguous())


def decode(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The decoded operand, rounded once more to `dtype`, BF16 or FP32, where that is not its own."""
    return plan("read_values", packed, (dtype,))(packed.tensors)[0]


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
    run = plan("packed", packed, (swizzled, native_draws), q, rotation, seed)
    return tuple(run(packed.tensors, amax, seed, site, site if signs_site is None else signs_site))


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
    run = plan("decoded", packed, (dtype, scaled, native_draws), q, rotation, seed)
    return tuple(run(packed.tensors, amax, seed, site, site if signs_site is None else signs_site))


def amax(packed: Packed, *, rotation: Rotation | None = None, seed: Tensor | None = None, signs_site: int = 0) -> Tensor:
    """Largest finite magnitude of the decoded (and rotated) operand: FP32, 0-d."""
    run = plan("amax", packed, (), None, rotation, seed)
    return run(packed.tensors, None, seed, signs_site, signs_site)[0]
