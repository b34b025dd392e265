"""A prediction, not a measurement: what each linear of a model costs in BF16, FP8 and FP4 on a GPU.

A GEMM takes 2 M N K operations at the published dense peak times the share of it that GEMMs reach, over the share of the
multiprocessors that its tiles occupy; no less than its bytes at the memory's speed. A quantized operand takes its bytes, read
in BF16 (twice where a tensor amax is needed) and written as codes or decoded, at the speed of the generated kernels: shares of
a copy, measured on an H200. Every kernel has a fixed cost. What is not a linear takes the same time in every precision.

exact=False is the backend's option: where tensor cores have FP8 and not FP4, MXFP4 operands are packed, their codes read once
more and written as FP8, and multiplied at the FP8 peak. On Hopper FP8 codes with FP32 block scales are multiplied as they are,
at the share of the peak that FP8 without block scales reaches there; the scales of 1x128 blocks are transposed for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fp4
from fp4.compiler.policy import GemmPrecision, LinearSite, Policy
from fp4.runtime.spec import FP8, MXFP4, NVFP4, Quantizer, Rotation

ROLES = ("fprop", "dgrad", "wgrad")
# Share of a copy's speed of the quantize kernels on an H200, (16384, 4096), by their names in
# benchmarks/results/gpu_kernels_h200.json: decoded and packed along rows of memory, decoded and packed along its columns.
SHARES = {
    "nearest": (0.98, 0.97, 0.89, 0.89),
    "nearest 16x16": (0.94, 0.89, 0.89, 0.92),
    "nearest H16": (0.94, 0.87, 0.87, 0.74),
    "nearest H128": (0.91, 0.59, 0.72, 0.52),
    "stochastic": (0.90, 0.56, 0.81, 0.56),
    "stochastic H16": (0.78, 0.48, 0.69, 0.43),
    "four_six": (0.81, 0.53, 0.63, 0.43),
    "ms_eden H128": (0.74, 0.46, 0.54, 0.33),
    "mxfp4 floor": (0.97, 0.98, 0.90, 0.89),
}
# The same of the kernels that find a tensor's amax: along rows of memory, along its columns.
AMAX_SHARES = {"amax": (1.00, 0.94), "amax H16": (0.99, 0.90), "amax H128": (0.77, 0.73)}


class RooflineError(ValueError):
    """A GPU or an input that there is none of; the message lists those there are."""


@dataclass(frozen=True)
class Inputs:
    """What a prediction rests on; every field can be changed.

    target: the architecture, which says what is multiplied as it is. bf16, fp8, fp4: published dense peaks, TFLOP/s, FP32
    accumulation; 0 where there is none. bandwidth: published, TB/s. processors: multiprocessors. *_efficiency: share of the
    peak that large GEMMs reach; copy_efficiency: share of the bandwidth that a copy reaches. quantize: factor on the measured
    speed of the quantize kernels. fp8_operand: share of a copy's speed of the kernel that writes codes as FP8. kernel_us: fixed
    cost of a kernel, microseconds. rest: share of a BF16 step that is no linear. assumed: fields that no measurement stands
    behind.
    """

    gpu: str
    target: str
    bf16: float
    fp8: float
    fp4: float
    bandwidth: float
    processors: int
    bf16_efficiency: float = 0.72
    fp8_efficiency: float = 0.60
    fp4_efficiency: float = 0.60
    copy_efficiency: float = 0.87
    quantize: float = 1.0
    fp8_operand: float = 0.79
    kernel_us: float = 3.0
    rest: float = 0.21
    assumed: tuple[str, ...] = ()

    def changed(self, **values: float) -> Inputs:
        """With other values. Raises RooflineError for a field that is no number of it."""
        numbers = [f.name for f in dataclasses.fields(self) if f.name not in ("gpu", "target", "assumed")]
        for name, value in values.items():
            if name not in numbers:
                raise RooflineError(f"no input {name!r}; write one of {', '.join(numbers)}")
            if not (value >= 0 and math.isfinite(value)):
                raise RooflineError(f"{name}={value}; write a number that is not negative")
        return dataclasses.replace(self, assumed=tuple(a for a in self.assumed if a not in values), **values)  # type: ignore[arg-type]


_NOWHERE = ("kernel_us", "rest")
_ELSEWHERE = ("bf16_efficiency", "fp8_efficiency", "fp4_efficiency", "copy_efficiency", "quantize", *_NOWHERE)
# NVIDIA: H200 data sheet; DGX B200 and B300 data sheets (dense, an eighth of the system); RTX Blackwell architecture paper
# (RTX 5090, FP32 accumulation). The efficiencies are those measured on an H200: BF16 660-730 of 989 TFLOP/s, FP8 1120-1270 of
# 1979, a copy 4.18 of 4.8 TB/s.
GPUS = {
    "h200": Inputs("NVIDIA H200", "sm_90", 989, 1979, 0, 4.8, 132, assumed=_NOWHERE),
    "b200": Inputs("NVIDIA B200", "sm_100a", 2250, 4500, 9000, 8.0, 148, assumed=_ELSEWHERE),
    "b300": Inputs("NVIDIA B300", "sm_103a", 2250, 4500, 13500, 8.0, 160, assumed=_ELSEWHERE),
    "rtx5090": Inputs("NVIDIA GeForce RTX 5090", "sm_120a", 209.5, 419, 1676, 1.792, 170, assumed=_ELSEWHERE),
}


def gpu(name: str) -> Inputs:
    if name not in GPUS:
        raise RooflineError(f"no figures of a GPU {name!r}; write one of {', '.join(GPUS)}, and change what differs")
    return GPUS[name]


@dataclass(frozen=True)
class LinearTime:
    """A linear's predicted seconds in a step: forward and backward, quantizing included.

    gemms: seconds of each GEMM's own kernels under the recipe by role, and in BF16. why: how each GEMM is multiplied.
    """

    name: str
    m: int
    n: int
    k: int
    bf16: float
    fp8: float
    fp4: float
    gemms: dict[str, tuple[float, float]]
    how: dict[str, str]

    @property
    def gains(self) -> bool:
        """Is the recipe predicted to be faster than BF16?"""
        return self.fp4 < self.bf16


@dataclass(frozen=True)
class Prediction:
    """All linears of a step. step: seconds of a whole step, by precision. exact: the backend's option."""

    inputs: Inputs
    recipe: str
    linears: tuple[LinearTime, ...]
    exact: bool = True

    def total(self, precision: str) -> float:
        """Seconds of all linears: precision bf16, fp8 or fp4."""
        return sum(getattr(x, precision) for x in self.linears)

    def step(self, precision: str) -> float:
        """Seconds of a step: the linears and what is not one, which takes the same time in every precision."""
        rest = self.total("bf16") * self.inputs.rest / (1 - self.inputs.rest)
        return self.total(precision) + rest

    def to_dict(self) -> dict[str, Any]:
        return {
            "prediction": True,
            "recipe": self.recipe,
            "exact": self.exact,
            "inputs": dataclasses.asdict(self.inputs),
            "step_seconds": {p: self.step(p) for p in ("bf16", "fp8", "fp4")},
            "linears": [dataclasses.asdict(x) for x in self.linears],
        }


def predict(
    sites: Sequence[LinearSite], inputs: Inputs, recipe: str = "nvfp4", policy: Policy | None = None, exact: bool = True
) -> Prediction:
    """Predicted times of a model's linears. sites: as ``linears`` finds them. policy: in place of the recipe's own.

    exact: the backend's option; False: on a target with FP8 tensor cores and no FP4 ones, MXFP4 operands, and on Hopper FP8
    with block scales, are multiplied in FP8.
    """
    if not 0 <= inputs.rest < 1:
        raise RooflineError(f"rest={inputs.rest}; write a share from 0 to under 1")
    chosen = policy or fp4.recipe(recipe)
    eight = fp4.recipe("mxfp8", keep_heads=False, high_precision_tail=0.0).precision.gemms()
    decisions, _ = chosen.assign(sites)
    found = []
    for site, decision in zip(sites, decisions, strict=True):
        precisions = decision.precision.gemms()
        times: dict[str, tuple[float, float]] = {}
        how: dict[str, str] = {}
        total8 = 0.0
        for role in site.roles:
            mnk = _product(site, role)
            plain = _product_seconds(inputs, *mnk, "bf16", 2.0, 2.0)
            seconds, how[role] = _gemm(inputs, role, mnk, precisions[role], exact)
            times[role] = seconds, plain
            total8 += _gemm(inputs, role, mnk, eight[role], exact)[0]
        bf16, fp4_seconds = (sum(t[i] for t in times.values()) for i in (1, 0))
        sizes = (int(site.m or 0), int(site.n or 0), int(site.k or 0))
        found.append(LinearTime(site.name, *sizes, bf16, total8, fp4_seconds, times, how))
    return Prediction(inputs, chosen.name if policy else recipe, tuple(found), exact)


def _product(site: LinearSite, role: str) -> tuple[int, int, int]:
    """Rows, columns and contracted length of a GEMM of the linear."""
    m, n, k = int(site.m or 0), int(site.n or 0), int(site.k or 0)
    return {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[role]


def _gemm(inputs: Inputs, role: str, mnk: tuple[int, int, int], precision: GemmPrecision, exact: bool) -> tuple[float, str]:
    """Seconds of a GEMM and of quantizing its operands, and how it is multiplied."""
    from fp4.kernels.matmul_spec import no_instruction
    from fp4.kernels.target import Target
    from fp4.passes.lower_fp8 import FP8_ONLY, HOPPER, formats

    m, n, k = mnk
    first, second = precision.first.quantizer, precision.second.quantizer
    if not precision.quantized:
        return _product_seconds(inputs, m, n, k, "bf16", 2.0, 2.0), "BF16"
    target = Target(inputs.target)
    reason = no_instruction(first, second, target)
    in_fp8 = not exact and target.capability in FP8_ONLY and bool(formats(first, second, target.capability == HOPPER))
    total = sum(
        _quantize_seconds(inputs, role, i, rows, k, q, precision.rotation, bool(reason) and not in_fp8)
        for i, (rows, q) in enumerate(((m, first), (n, second)))
        if q is not None
    )
    if in_fp8:
        total += sum(_fp8_seconds(inputs, rows * k, q) for rows, q in ((m, first), (n, second)) if q is not None)
        how = "MXFP4 in FP8" if isinstance(first, MXFP4) else "FP8"
        return total + _product_seconds(inputs, m, n, k, "fp8", 1.0, 1.0), how
    if reason:
        slower = "" if all(q is None or q.exact_in_bf16 for q in (first, second)) else "; in FP32, slower than predicted"
        return total + _product_seconds(inputs, m, n, k, "bf16", 2.0, 2.0), f"emulated: {reason}{slower}"
    assert first is not None
    assert second is not None
    kind = "fp4" if first.packed and second.packed else "fp8"
    sizes = first.bits_per_element / 8, second.bits_per_element / 8
    return total + _product_seconds(inputs, m, n, k, kind, *sizes), kind.upper()


def _product_seconds(inputs: Inputs, m: int, n: int, k: int, kind: str, a_bytes: float, b_bytes: float) -> float:
    tiles = max(1, math.ceil(m / 128) * math.ceil(n / 256))
    tiles *= max(1, inputs.processors // tiles)  # split-K
    occupied = tiles / (math.ceil(tiles / inputs.processors) * inputs.processors)
    peak = getattr(inputs, kind) * 1e12 * getattr(inputs, f"{kind}_efficiency") * occupied
    moved = (a_bytes * m + b_bytes * n) * k + 2.0 * m * n
    return max(2.0 * m * n * k / peak, moved / _copy(inputs)) + inputs.kernel_us * 1e-6


def _copy(inputs: Inputs) -> float:
    """Bytes a second of a copy, reads and writes counted."""
    return inputs.bandwidth * 1e12 * inputs.copy_efficiency


def _quantize_seconds(
    inputs: Inputs, role: str, operand: int, rows: int, columns: int, q: Quantizer, rotation: Rotation | None, emulated: bool
) -> float:
    elements, packed_bytes = rows * columns, q.bits_per_element / 8
    square_weight = role == "dgrad" and operand == 1 and q.transposable
    along_columns = role == "wgrad" or (role == "dgrad" and operand == 1 and not (emulated and square_weight))
    saved = role == "wgrad" and operand == 1  # X: packed by forward
    packed = saved or not emulated
    shares = SHARES[_kind(q, rotation)]
    amax_share = AMAX_SHARES["amax" + _rotated(rotation)][along_columns]
    share = shares[2 * along_columns + packed] * inputs.quantize
    seconds = [elements * (2.0 + (packed_bytes if packed else 2.0)) / (_copy(inputs) * share)]
    if q.needs_amax:
        seconds.append(elements * 2.0 / (_copy(inputs) * amax_share * inputs.quantize))
    if saved and emulated:  # decoded again by backward
        seconds.append(elements * (packed_bytes + 2.0) / (_copy(inputs) * shares[0] * inputs.quantize))
    return sum(seconds) + len(seconds) * inputs.kernel_us * 1e-6


def _fp8_seconds(inputs: Inputs, elements: int, q: Quantizer) -> float:
    """Seconds of making a quantized operand what FP8 tensor cores multiply.

    MXFP4: the largest scale is found, codes are read and an FP8 tensor is written. FP8: the scales of 1x128 are transposed.
    """
    if isinstance(q, FP8):
        return elements * 8.0 / q.block[1] / _copy(inputs) + inputs.kernel_us * 1e-6 if q.block[0] == 1 else 0.0
    moved = elements * (q.bits_per_element / 8 + 1.0)
    return moved / (_copy(inputs) * inputs.fp8_operand) + 2 * inputs.kernel_us * 1e-6


def _kind(q: Quantizer, rotation: Rotation | None) -> str:
    """The row of SHARES that a quantizer's kernel is like."""
    if isinstance(q, NVFP4) and q.four_six:
        return "four_six"
    if q.rounding == "ms_eden":
        return "ms_eden H128"
    if q.rounding == "stochastic":
        return "stochastic" if rotation is None else "stochastic H16"
    if rotation is not None:
        return "nearest" + _rotated(rotation)
    if q.block[0] > 1:
        return "nearest 16x16"
    return "mxfp4 floor" if isinstance(q, MXFP4) or q.scale_format == "e8m0" else "nearest"


def _rotated(rotation: Rotation | None) -> str:
    """What a rotation adds to a kernel's name in SHARES and AMAX_SHARES."""
    return "" if rotation is None else " H16" if rotation.size <= 32 else " H128"


def linears(model: Any, *inputs: Any, **named: Any) -> list[LinearSite]:
    """The ``nn.Linear`` calls of one forward on meta tensors, in execution order: nothing is computed or allocated.

    model: a module, which is moved to the meta device and lost with that. inputs, named: its arguments, of which shapes matter.
    """
    import torch
    from torch.utils._pytree import tree_map

    calls: list[tuple[str, Any, int]] = []
    names = {module: name for name, module in model.named_modules()}

    def record(module: Any, arguments: Any, output: Any) -> None:
        calls.append((names[module], module, output.numel() // max(1, output.shape[-1])))

    model = model.to("meta")
    hooks = [m.register_forward_hook(record) for m in names if isinstance(m, torch.nn.Linear)]
    try:
        with torch.no_grad():
            given = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (inputs, named))
            model(*given[0], **given[1])
    finally:
        for hook in hooks:
            hook.remove()
    return list(_sites(calls))


def _sites(calls: Sequence[tuple[str, Any, int]]) -> Iterator[LinearSite]:
    for i, (name, module, rows) in enumerate(calls):
        n, k = module.weight.shape
        roles = ROLES if module.weight.requires_grad else ROLES[:2]
        yield LinearSite(name, i, len(calls), rows, n, k, str(module.weight.dtype), type(module).__name__, roles)
