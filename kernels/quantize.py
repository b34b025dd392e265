"""Launchers: the oracle's functions (``fp4.runtime.reference``) as one generated kernel each, on a CUDA device.

Operands are 2-D, (R, C), contracted dimension last, of any strides: a transposed, strided or expanded one is read where it
lies.
Kernels run on the current stream of the operand's device and read seeds there, so a replayed CUDA graph draws anew.
Results equal the oracle's bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import posthoc
from fp4.kernels.build import Output, require_triton
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.launch import Plan, flat, planned
from fp4.kernels.target import target_of
from fp4.runtime.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, ceil_div
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
    plan = quantize_plan(x, q, rotation, seed, swizzled, native_draws)
    return tuple(plan((x,), amax, seed, site, site if signs_site is None else signs_site))


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
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decoded values (R, C or its padding by the rotation) and tensor scale; nothing is packed on the way.

    As ``reference.decode`` (``reference.dequantize`` if `scaled`) of what `quantize` returns. Outer scales, if `scaled`, are in
    the values alone, and the second result is FP32 of shape (0,). dtype: BF16 or FP32; or, for
    MXFP4 without `scaled`, E4M3 or E5M2, saturating where the value is out of range. factor: FP32 of one element, which the
    returned tensor scale is multiplied with. The rest as `quantize`.
    """
    plan = fake_quantize_plan(x, q, rotation, seed, dtype, scaled, native_draws, factor)
    return tuple(plan((x,) if factor is None else (x, factor), amax, seed, site, site if signs_site is None else signs_site))


def amax(x: Tensor, *, rotation: Rotation | None = None, seed: Tensor | None = None, signs_site: int = 0) -> Tensor:
    """Largest finite magnitude of `x` (R, C), after the rotation if one is given: FP32, 0-d, as ``reference.amax``.

    A maximum has no order, so the result is the same at every run.
    """
    return amax_plan(x, rotation, seed)((x,), None, seed, signs_site, signs_site)[0]


def rotate(x: Tensor, rotation: Rotation, *, seed: Tensor | None = None, site: int = 0) -> Tensor:
    """x diag(signs) H_n / sqrt(n), as ``reference.rotate``: (R, C) to (R, C padded to n), BF16 or FP32 as the rotation says."""
    plan = planned(Run, "rotated", (x,), (None, rotation, draws(seed)))
    return plan((x,), None, seed, site, site)[0]


def quantize_plan(
    x: Tensor, q: Quantizer, rotation: Rotation | None, seed: Tensor | None, swizzled: bool, native_draws: bool
) -> Any:
    """The plan of `quantize`; called with ((x,), amax, seed, site, signs_site)."""
    return planned(Run, "packed", (x,), (q, rotation, draws(seed)), (swizzled, native_draws))


def fake_quantize_plan(
    x: Tensor,
    q: Quantizer,
    rotation: Rotation | None,
    seed: Tensor | None,
    dtype: torch.dtype,
    scaled: bool,
    native_draws: bool,
    factor: Tensor | None = None,
) -> Any:
    """The plan of `fake_quantize`; called as that of `quantize`, with ((x, factor), ...) where there is one."""
    return planned(
        Run, "decoded", (x,) if factor is None else (x, factor), (q, rotation, draws(seed)), (dtype, scaled, native_draws)
    )


def amax_plan(x: Tensor, rotation: Rotation | None, seed: Tensor | None) -> Any:
    return planned(Run, "amax", (x,), (None, rotation, draws(seed)))


def draws(seed: Tensor | None) -> int | None:
    """What a plan depends on of a seed: its elements, or that there is none."""
    return None if seed is None else seed.numel()


class Run:
    """One kind of operand (rows, columns) and what is done to it; each method makes the plan of a kernel.

    tensors: the operand's and, for `decoded`, the tensor scale's factor.

    `requantize.PackedRun` is one whose operand is read from codes.
    """

    inputs: tuple[str, ...] = ("x_ptr", "factor_ptr")
    seen: dict[str, torch.dtype] = {}  # noqa: RUF012
    factored = False

    def __init__(self, tensors: Sequence[Tensor], q: Quantizer | None, rotation: Rotation | None, seeds: int | None) -> None:
        x, *factor = tensors
        self.inputs, self.factored = type(self).inputs[: len(tensors)], bool(factor)
        if x.dim() != 2:
            raise ValueError(f"x has {x.dim()} dimensions; flatten it to (rows, contracted dimension)")
        if x.dtype not in INPUT:
            raise TypeError(f"x is {x.dtype}; write x.float() for FP32, or pass bfloat16 or float16")
        columns = x.stride(0) == 1 and x.stride(1) != 1 and x.shape[1] > 1
        self.fields: dict[str, Any] = {"memory": "columns" if columns else "rows", "input": INPUT[x.dtype]}
        self.numbers = {"rows": x.shape[0], "columns": x.shape[1], "stride_r": x.stride(0), "stride_c": x.stride(1)}
        self.prepare(x.device, q, rotation, seeds)

    def prepare(self, device: torch.device, q: Quantizer | None, rotation: Rotation | None, seeds: int | None) -> None:
        require_triton()
        random = next((s for s in (q, rotation) if s is not None and s.needs_seed), None)
        if random is not None and seeds is None:
            raise SpecError(f"{random} draws random numbers; pass seed, an int64 tensor of one element")
        self.device, self.q, self.rotation, self.seeds = device, q, rotation, seeds
        self.rows, columns = self.numbers["rows"], self.numbers["columns"]
        self.width = columns if rotation is None else ceil_div(columns, rotation.size) * rotation.size
        self.target = target_of(device)

    def packed(self, swizzled: bool, native_draws: bool = False) -> Any:
        """Codes, block scales, tensor scale."""
        q = self.q
        assert q is not None
        if isinstance(q, NVFP4) and q.posthoc:
            return posthoc.Packed(self, swizzled)
        codes, scales = self.codes(), self.scales(swizzled)
        layout = "swizzled" if swizzled else "plain"
        return self.plan("packed", [codes, scales, self.tensor_scale()], scale_layout=layout, native_draws=native_draws)

    def decoded(self, dtype: torch.dtype, scaled: bool, native_draws: bool = False) -> Any:
        """Decoded values, tensor scale; shape (0,) in place of outer scales that are in the values."""
        assert self.q is not None
        if dtype not in OUTPUT:
            raise TypeError(f"fake_quantize: dtype={dtype}; write one of {', '.join(str(d) for d in OUTPUT)}")
        if isinstance(self.q, NVFP4) and self.q.posthoc and not self.factored:
            return posthoc.Decoded(self, dtype, scaled)
        absent = scaled and self.q.has_outer_scale
        tensor_scale = Output("tensor_scale_ptr", (0,), torch.float32) if absent else self.tensor_scale()
        outputs = [self.values(dtype, self.width), tensor_scale]
        how = {"scaled": scaled, "native_draws": native_draws, "factored": self.factored}
        return self.plan("decoded", outputs, dtype=OUTPUT[dtype], **how)

    def amax(self) -> Plan:
        """The (rotated) operand's largest finite magnitude."""
        return self.plan("amax", [Output("amax_ptr", (), torch.float32, torch.int32, zero=True)])

    def rotated(self) -> Plan:
        assert self.rotation is not None
        dtype = torch.bfloat16 if self.rotation.bf16 else torch.float32
        return self.plan("rotated", [self.values(dtype, self.width)], dtype=OUTPUT[dtype])

    def values(self, dtype: torch.dtype, columns: int) -> Output:
        return Output("y_ptr", (self.rows, columns), dtype, torch.uint8 if dtype.itemsize == 1 else None)

    def codes(self) -> Output:
        q = self.q
        assert q is not None
        bytes_per_row = ceil_div(self.width, q.block[1]) * (q.block[1] // 2 if q.packed else q.block[1])
        words = {16: torch.int64, 8: torch.int32}[min(16, q.block[1])] if q.packed else None
        return Output("codes_ptr", (self.rows, bytes_per_row), torch.uint8, words)

    def scales(self, swizzled: bool) -> Output:
        q = self.q
        assert q is not None
        columns = ceil_div(self.width, q.block[1])
        if swizzled:
            size = ceil_div(self.rows, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS) * TILE_BYTES
            return Output("scales_ptr", (size,), torch.uint8, zero=True)
        dtype = torch.float32 if q.scale_format == "fp32" else torch.uint8
        return Output("scales_ptr", (ceil_div(self.rows, q.block[0]), columns), dtype)

    def tensor_scale(self) -> Output:
        """Where the kernel writes the tensor scale or the outer scales."""
        assert self.q is not None
        shape = (self.rows, ceil_div(self.width, self.q.outer)) if self.q.has_outer_scale else ()
        return Output("tensor_scale_ptr", shape, torch.float32)

    def plan(self, output: str, outputs: Sequence[Output], **fields: Any) -> Plan:
        """Of the kernel that writes `output`. fields: the specification's others."""
        q = self.q if output in ("packed", "decoded") else None
        spec = self.spec(
            quantizer=q,
            rotation=self.rotation,
            output=output,
            aligned=self.width % 8 == 0,
            single=self.numbers["columns"] == 1,
            located=q is not None and q.needs_seed and self.seeds == 3,
            **self.fields,
            **fields,
        )
        amax = self.amax() if q is not None and q.needs_amax else None
        random = (q is not None and q.needs_seed) or (self.rotation is not None and self.rotation.needs_seed)
        numbers = flat(spec, self.numbers, self.width)
        size = (self.rows, self.width) if numbers is self.numbers else (numbers["rows"], numbers["columns"])
        return Plan(spec, self.target, self.device, size, self.inputs, numbers, outputs, self.seen, amax, random)

    def spec(self, **fields: Any) -> KernelSpec:
        return KernelSpec(**fields)
