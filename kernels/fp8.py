"""The kernel that turns packed MXFP4 into an FP8 tensor (runtime/fp8.py), and ``torch._scaled_mm`` of two such.

Half a byte an element in, a byte out. The tensor's largest scale is read from memory, so nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4.kernels.build import Output
from fp4.kernels.codegen import GENERATORS
from fp4.kernels.launch import Plan, planned
from fp4.kernels.packed import PackedKernel, PackedSpec
from fp4.kernels.quantize import OUTPUT
from fp4.kernels.requantize import PackedRun, readable_tensors
from fp4.runtime import fp8
from fp4.runtime.fp8 import NAN_SCALE, REACH
from fp4.runtime.spec import MXFP4, Quantizer, SpecError

REACHES = {OUTPUT[dtype]: reach for dtype, reach in REACH.items()}
MULTIPLE = 16  # of K and N, what cuBLAS wants


@dataclass(frozen=True)
class Fp8Spec(PackedSpec):
    """`PackedSpec` of MXFP4 with output "values" in e4m3 or e5m2, moved to the top of the format's reach."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.source, MXFP4) or self.output != "values" or self.memory != "rows" or self.factor != "none":
            raise SpecError(f"source={self.source}, output={self.output!r}: only the values of packed MXFP4 are exact in FP8")

    @property
    def stores_fp8(self) -> bool:
        return True

    @property
    def pointer_types(self) -> dict[str, str]:
        return {**super().pointer_types, "top_ptr": "*i32", "factor_ptr": "*fp32", "outside_ptr": "*i64"}


class Fp8Kernel(PackedKernel):
    """Load words, scale by the block's distance from the largest scale, convert, store; count what is below the reach."""

    spec: Fp8Spec

    def body(self) -> None:
        reach = REACHES[self.spec.dtype]
        self.once(
            f"top = tl.maximum(tl.load({self.pointer('top_ptr')}), {reach.most + 1})",
            "outside = tl.zeros((TR * TB,), tl.int32)",
        )
        super().body()
        self.after += [
            f"tl.store({self.pointer('factor_ptr')} + tl.program_id(0), {self.call('e8m0_value')}(top - {reach.most}), "
            "mask=tl.program_id(0) == 0)",
            "count = tl.sum(outside, 0).to(tl.int64)",
            f"tl.atomic_add({self.pointer('outside_ptr')}, count, mask=count > 0)",
            "elements = (tl.zeros((), tl.int64) + rows) * columns",
            "tl.atomic_add(outside_ptr + 1, elements, mask=tl.program_id(0) == 0)",
        ]

    def decode_scale(self) -> None:
        reach = REACHES[self.spec.dtype]
        self.add(
            f"exponent = scale_code - top + {reach.most}",
            f'scale = tl.where(scale_code == {NAN_SCALE}, float("nan"), e8m0_value(tl.maximum(exponent + 127, 0)))',
            "nonzero = words | words >> 1 | words >> 2  # of magnitudes, a bit each",
            f"nonzero = tl.where((exponent < {reach.least})[None, :], nonzero & 0x11111111, 0)",
            "outside += tl.sum((nonzero * 0x11111111 >> 28) & 15, 0)",
        )
        self.call("e8m0_value")


GENERATORS[Fp8Spec] = Fp8Kernel


def fp8_spec(q: Quantizer, dtype: str) -> Fp8Spec:
    """The kernel of what `q` packed. dtype: e5m2 or e4m3."""
    return Fp8Spec(None, output="values", dtype=dtype, input="fp32", source=MXFP4(block=q.block))


class _Fp8Run(PackedRun):
    kind = Fp8Spec
    inputs = ("packed_ptr", "packed_scales_ptr", "top_ptr", "outside_ptr")

    def __init__(self, tensors: Sequence[Tensor], source: Quantizer, columns: int) -> None:
        super().__init__(tensors[:2], source, columns, torch.float32, False, None, None, None)
        if any(t.device != self.device for t in tensors):
            raise ValueError(f"fp8 operand: tensors on {[str(t.device) for t in tensors]}; move them to one device")
        self.inputs = type(self).inputs

    def moved(self, dtype: torch.dtype) -> Plan:
        outputs = [self.values(dtype, self.numbers["columns"]), Output("factor_ptr", (), torch.float32)]
        return self.plan("values", outputs, dtype=OUTPUT[dtype])


def operand(
    codes: Tensor, scales: Tensor, top: Tensor, q: Quantizer, dtype: torch.dtype, counter: Tensor
) -> tuple[Tensor, Tensor]:
    """Values and factor of ``runtime.fp8.operand``, on a CUDA device. counter: int64 (2,), to which the count of elements
    outside the reach and that of all elements are added."""
    tensors = (*readable_tensors(codes, scales, None), top, counter)
    plan = planned(_Fp8Run, "moved", tensors, (MXFP4(block=q.block), 2 * codes.shape[1]), (dtype,))
    return tuple(plan(tensors))


def mm(
    a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, alpha: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``runtime.fp8.mm`` by cuBLAS: the partial sums of FP8 tensor cores, added in FP32 (no fast accumulation)."""
    if not (a.numel() and b.numel()):
        return fp8.mm(a, b, a_factor, b_factor, alpha, bias, dtype)
    rows = b.shape[0]
    if rows % MULTIPLE:
        b = torch.nn.functional.pad(b.view(torch.uint8), (0, 0, 0, -rows % MULTIPLE)).view(b.dtype)
        bias = bias if bias is None else torch.nn.functional.pad(bias, (0, -rows % MULTIPLE))
    scale = b_factor if alpha is None else b_factor * alpha
    inside = bias is None or bias.dtype == dtype != torch.float32
    y = torch._scaled_mm(
        a, b.t(), a_factor, scale, bias if inside else None, out_dtype=dtype if inside else torch.float32, use_fast_accum=False
    )
    if not inside:
        assert bias is not None
        y = (y + bias.float()).to(dtype)
    return y[:, :rows].contiguous() if rows % MULTIPLE else y
