"""Kernels of QuEST's clip mask (Quartet 2505.14669): one that quantizes writes it, one that rotates a gradient back applies it.

The mask has one bit an element, 1 where the quantizer did not clip it. A unit of 16 columns is two bytes of it, so it is made
and read where the unit is in registers; the rotated operand and the masked gradient never go to memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4.kernels.build import Output
from fp4.kernels.codegen import GENERATORS, Kernel
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.launch import Plan, planned
from fp4.kernels.quantize import INPUT, OUTPUT, Run, draws
from fp4.runtime.formats import E2M1_MAX
from fp4.runtime.layout import ceil_div
from fp4.runtime.spec import MXFP4, Quantizer, Rotation, SpecError


def maskable(q: Any) -> bool:
    """Has the quantizer a clip mask? Its scale must be the power of two compared with."""
    return isinstance(q, MXFP4) and q.prescale == 1


@dataclass(frozen=True)
class MaskedSpec(KernelSpec):
    """`KernelSpec` with packed output of MXFP4 that writes the clip mask too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not maskable(self.quantizer) or self.output != "packed":
            raise SpecError(f"{self.quantizer}, output={self.output!r}: the clip mask is of packed MXFP4 of prescale 1")

    @property
    def pointer_types(self) -> dict[str, str]:
        return {"mask_ptr": "*i16"}


class MaskedKernel(Kernel):
    """`Kernel` that writes the clip mask after the codes: |x| < 6 * 2^E; 0 where the block's scale is NaN."""

    def store_codes(self, width: int) -> None:
        super().store_codes(width)
        scaled = f"tl.abs(x * {self.over(self.spread(self.call('e8m0_inverse') + '(scale_code)'))})"
        self.add(
            f"kept = ({scaled} < {float(E2M1_MAX)}) & {self.over(self.spread('finite'))}",
            "mask = tl.sum(kept.to(tl.int32) << k, 0).to(tl.int16)  # bit k is the unit's column k",
        )
        row, unit, mask = self.stored("mask")
        inside = self.where(f"({row} < rows) & ({unit} < units)")
        self.add(f"tl.store({self.pointer('mask_ptr')} + {row} * units + {unit}, {mask}, mask={inside})")


@dataclass(frozen=True)
class UnrotateSpec(KernelSpec):
    """The inverse of a rotation, ``rotated`` output. masked: of a gradient that the clip mask is applied to first."""

    masked: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output != "rotated":
            raise SpecError(f"output={self.output!r}; the inverse of a rotation writes 'rotated'")

    @property
    def pointer_types(self) -> dict[str, str]:
        return {"mask_ptr": "*i16"}


class UnrotateKernel(Kernel):
    """Load, mask, butterfly, multiply, signs, one rounding; the padding is cut off."""

    spec: UnrotateSpec
    signs_on_load = False  # they are the last

    def body(self) -> None:
        self.tile()
        self.load()
        if self.spec.masked:
            self.scalar("mask_stride")
            self.section("zero where the forward clipped: bit k of a unit's two bytes is its column k")
            self.add(
                f"inside = {self.where('(row < rows) & (unit < units)')}",
                f"mask = tl.load({self.pointer('mask_ptr')} + row * mask_stride + unit, mask=inside, other=0).to(tl.int32)",
                "x = tl.where((mask[None, :] >> k) & 1 != 0, x, 0.0)",
            )
        self.rotate()
        self.section("store")
        self.scalar("kept_columns")
        self.store_values("x", "kept_columns")

    def rotate(self) -> None:
        r = self.spec.rotation
        assert r is not None
        self.section(f"rotate back: {r.size.bit_length() - 1} butterfly stages, 1/sqrt({r.size}), signs ({r.signs})")
        self.hadamard()
        self.add(f"x = x * {self.normalization()}")
        if r.signs != "none":
            self.signs()


GENERATORS[MaskedSpec] = MaskedKernel
GENERATORS[UnrotateSpec] = UnrotateKernel


class _MaskedRun(Run):
    def spec(self, **fields: Any) -> KernelSpec:
        return MaskedSpec(**fields)

    def masked(self, native_draws: bool) -> Plan:
        """As `packed`, and the mask."""
        assert self.q is not None
        width = ceil_div(self.width, self.q.block[1]) * self.q.block[1]
        mask = Output("mask_ptr", (self.rows, width // 8), torch.uint8, torch.int16)
        outputs = [self.codes(), self.scales(False), self.tensor_scale(), mask]
        return self.plan("packed", outputs, native_draws=native_draws)


class _UnrotateRun(Run):
    """Of a gradient and, where there is one, a mask."""

    inputs: tuple[str, ...] = ("x_ptr", "mask_ptr")
    seen = {"mask_ptr": torch.int16}  # noqa: RUF012

    def __init__(self, tensors: Sequence[Tensor], rotation: Rotation, seeds: int | None) -> None:
        y, *mask = tensors
        if any(m.device != y.device for m in mask):
            raise ValueError(f"unrotate: y on {y.device}, the mask on {mask[0].device}; move it")
        super().__init__((y,), None, rotation, seeds)
        self.inputs = type(self).inputs[: len(tensors)]
        self.fields |= {"masked": bool(mask)}
        self.numbers |= {"mask_stride": mask[0].shape[1] // 2 if mask else 0}

    def spec(self, **fields: Any) -> KernelSpec:
        return UnrotateSpec(**fields)

    def unrotated(self, columns: int, dtype: torch.dtype) -> Plan:
        self.numbers |= {"kept_columns": columns}
        return self.plan("rotated", [self.values(dtype, columns)], dtype=OUTPUT[dtype])


def quantize(
    x: Tensor,
    q: Quantizer,
    *,
    rotation: Rotation | None = None,
    seed: Tensor | None = None,
    site: int = 0,
    signs_site: int | None = None,
    native_draws: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, block scales, tensor scale and clip mask: ``quantize.quantize`` and ``reference.clip_mask`` in one kernel.

    The mask is uint8 (R, Cp/8). Raises SpecError for a quantizer without one.
    """
    plan = quantize_plan(x, q, rotation, seed, native_draws)
    return tuple(plan((x,), None, seed, site, site if signs_site is None else signs_site))


def quantize_plan(x: Tensor, q: Quantizer, rotation: Rotation | None, seed: Tensor | None, native_draws: bool) -> Any:
    """The plan of `quantize`; called with ((x,), None, seed, site, signs_site)."""
    if not maskable(q):
        raise SpecError(f"clip_mask: {q} is not MXFP4 of prescale 1, whose scale is the power of two compared with")
    return planned(_MaskedRun, "masked", (x,), (q, rotation, draws(seed)), (native_draws,))


def unrotate(
    y: Tensor,
    rotation: Rotation,
    *,
    columns: int,
    dtype: torch.dtype,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """``reference.unrotate`` of ``reference.apply_mask(y, mask)``: (R, Cp) of any strides to (R, columns) of `dtype`.

    dtype: BF16 or FP32. mask: uint8 (R, at least Cp/8), an even number of bytes a row; None for none. Raises TypeError for
    another dtype, ValueError for a mask of odd rows.
    """
    tensors = readable_tensors(y, mask)
    return unrotate_plan(tensors, rotation, seed, columns, dtype)(tensors, None, seed, site, site)[0]


def readable_tensors(y: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As the kernel reads them: the mask is contiguous and begins at one of its int16 words."""
    if mask is None:
        return (y,)
    mask = mask.contiguous()
    return y, mask.clone() if mask.data_ptr() % 2 else mask


def unrotate_plan(tensors: Sequence[Tensor], rotation: Rotation, seed: Tensor | None, columns: int, dtype: torch.dtype) -> Any:
    """The plan of `unrotate` for `readable_tensors`; called with (those, None, seed, site, site)."""
    y, *mask = tensors
    if dtype not in (torch.bfloat16, torch.float32) or y.dtype not in INPUT:
        raise TypeError(f"unrotate: {y.dtype} to {dtype}; write torch.bfloat16 or torch.float32")
    if mask and mask[0].shape[1] % 2:
        raise ValueError(f"unrotate: a mask of {mask[0].shape[1]} bytes a row; pass whole blocks, as clip_mask returns them")
    return planned(_UnrotateRun, "unrotated", tensors, (rotation, draws(seed)), (columns, dtype))
