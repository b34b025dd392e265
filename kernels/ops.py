"""Ops of the ``fp4::`` namespace that are one generated kernel on a GPU: what ``lower_emulated`` puts into a graph.

On any other device they are the oracle's functions, one after the other. The kernels' functions are registered for CUDA alone,
so no call asks where its operand lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import masks, requantize
from fp4.kernels import quantize as kernels
from fp4.runtime import ops, reference
from fp4.runtime.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, Size, ceil_div, swizzle_rows
from fp4.runtime.spec import Quantizer, Rotation

LIBRARY = torch.library.Library("fp4", "FRAGMENT")
DRAWS = "Tensor? amax, str quantizer, str rotation, Tensor? seed, int site, int signs_site, bool native_draws"
ARGUMENTS = f"Tensor x, {DRAWS}"
PACKED = "Tensor codes, Tensor scales, Tensor? factor, str source, SymInt columns, ScalarType decoded, bool transposed"


def _specs(quantizer: str, rotation: str) -> tuple[Quantizer, Rotation | None]:
    return ops.quantizer(quantizer), ops.rotation(rotation) if rotation else None


def _rotated(x: Tensor, rotation: Rotation | None, seed: Tensor | None, site: int) -> Tensor:
    return x if rotation is None else reference.rotate(x, rotation, seed, site)


def _rotate_quantize(
    x: Tensor,
    amax: Tensor | None,
    quantizer: str,
    rotation: str,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    native_draws: bool,
    swizzled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    q, r = _specs(quantizer, rotation)
    codes, scales, tensor_scale = reference.quantize(_rotated(x, r, seed, signs_site), q, amax, seed, site, native_draws)
    if swizzled:
        scales = swizzle_rows(scales, codes.shape[0], q.block[0])
    return codes.contiguous(), scales.contiguous(), tensor_scale.contiguous()


def _fake_quantize(
    x: Tensor,
    amax: Tensor | None,
    quantizer: str,
    rotation: str,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    native_draws: bool,
    dtype: torch.dtype,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    q, r = _specs(quantizer, rotation)
    y = _rotated(x, r, seed, signs_site)
    values, scales, _, _, tensor_scale = reference.quantize_values(y, q, amax, seed, site, native_draws)
    if q.outer:  # their scales are in the values alone
        decoded = reference.dequantize_values(values, scales, tensor_scale, q, y.shape[1], dtype)
        return decoded, tensor_scale.new_empty((0,))
    decoded = reference.decode_values(values, scales, q, y.shape[1], dtype).contiguous()
    return decoded, tensor_scale if factor is None else tensor_scale * factor


def _rotated_amax(x: Tensor, rotation: str, seed: Tensor | None, signs_site: int) -> Tensor:
    return reference.amax(_rotated(x, ops.rotation(rotation), seed, signs_site))


def _rotated_amax_fake(x: Tensor, rotation: str, seed: Tensor | None, signs_site: int) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _width(x: Tensor, rotation: Rotation | None) -> Size:
    return x.shape[1] if rotation is None else ceil_div(x.shape[1], rotation.size) * rotation.size


def _rotate_quantize_fake(
    x: Tensor,
    amax: Any,
    quantizer: str,
    rotation: str,
    seed: Any,
    site: int,
    signs_site: int,
    native_draws: bool,
    swizzled: bool = False,
) -> Any:
    q, r = _specs(quantizer, rotation)
    codes, scales, tensor_scale = ops.quantized_fake(x, x.shape[0], _width(x, r), q)
    if swizzled:
        size = ceil_div(x.shape[0], TILE_ROWS) * ceil_div(scales.shape[1], TILE_COLUMNS) * TILE_BYTES
        scales = scales.new_empty((size,))
    return codes, scales, tensor_scale


def _fake_quantize_fake(
    x: Tensor,
    amax: Any,
    quantizer: str,
    rotation: str,
    seed: Any,
    site: int,
    signs_site: int,
    native_draws: bool,
    dtype: torch.dtype,
    factor: Any = None,
) -> Any:
    q, r = _specs(quantizer, rotation)
    values = x.new_empty((x.shape[0], _width(x, r)), dtype=dtype)
    return values, x.new_empty((0,) if q.outer else (), dtype=torch.float32)


def _decoded(
    codes: Tensor, scales: Tensor, factor: Tensor | None, source: str, columns: int, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """The operand that the kernels decode as they read it."""
    q = ops.quantizer(source)
    if factor is None:
        x = reference.decode(codes, scales, q, columns, dtype)
    else:
        x = reference.dequantize(codes, scales, factor, q, columns, dtype)
    return x.t() if transposed else x


def _decode(codes: Tensor, scales: Tensor, factor: Tensor | None, source: str, columns: int, dtype: torch.dtype) -> Tensor:
    return _decoded(codes, scales, factor, source, columns, dtype, False).contiguous()


def _decode_fake(codes: Tensor, scales: Any, factor: Any, source: str, columns: Size, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


def _requantize(
    codes: Tensor,
    scales: Tensor,
    factor: Tensor | None,
    source: str,
    columns: int,
    decoded: torch.dtype,
    transposed: bool,
    amax: Tensor | None,
    quantizer: str,
    rotation: str,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    native_draws: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x = _decoded(codes, scales, factor, source, columns, decoded, transposed)
    return _rotate_quantize(x, amax, quantizer, rotation, seed, site, signs_site, native_draws)


def _fake_requantize(
    codes: Tensor,
    scales: Tensor,
    factor: Tensor | None,
    source: str,
    columns: int,
    decoded: torch.dtype,
    transposed: bool,
    amax: Tensor | None,
    quantizer: str,
    rotation: str,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    native_draws: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    x = _decoded(codes, scales, factor, source, columns, decoded, transposed)
    return _fake_quantize(x, amax, quantizer, rotation, seed, site, signs_site, native_draws, dtype)


def _quantize_masked(
    x: Tensor,
    amax: Tensor | None,
    quantizer: str,
    rotation: str,
    seed: Tensor | None,
    site: int,
    signs_site: int,
    native_draws: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, r = _specs(quantizer, rotation)
    y = _rotated(x, r, seed, signs_site)
    codes, scales, tensor_scale = reference.quantize(y, q, amax, seed, site, native_draws)
    mask = reference.clip_mask(y, scales, q)
    return codes.contiguous(), scales.contiguous(), tensor_scale.contiguous(), mask.contiguous()


def _quantize_masked_fake(
    x: Tensor, amax: Any, quantizer: str, rotation: str, seed: Any, site: int, signs_site: int, native_draws: bool
) -> tuple[Tensor, ...]:
    q, r = _specs(quantizer, rotation)
    width = ceil_div(_width(x, r), q.block[1]) * (q.block[1] // 8)
    return (*ops.quantized_fake(x, x.shape[0], _width(x, r), q), x.new_empty((x.shape[0], width), dtype=torch.uint8))


def _unrotate_masked(
    y: Tensor, mask: Tensor | None, rotation: str, seed: Tensor | None, site: int, columns: int, dtype: torch.dtype
) -> Tensor:
    r = ops.rotation(rotation)
    if mask is not None:
        y = reference.apply_mask(y, mask)
    return reference.unrotate(y, r, seed, site, columns, dtype).contiguous()


def _unrotate_masked_fake(
    y: Tensor, mask: Any, rotation: str, seed: Any, site: int, columns: Size, dtype: torch.dtype
) -> Tensor:
    return y.new_empty((y.shape[0], columns), dtype=dtype)


def _decoded_fake(codes: Tensor, scales: Any, factor: Any, source: str, columns: Size, dtype: Any, transposed: bool) -> Tensor:
    shape = (columns, codes.shape[0]) if transposed else (codes.shape[0], columns)
    return codes.new_empty(shape, dtype=dtype)


def _requantize_fake(*arguments: Any) -> Any:
    return _rotate_quantize_fake(_decoded_fake(*arguments[:7]), *arguments[7:])


def _fake_requantize_fake(*arguments: Any) -> Any:
    return _fake_quantize_fake(_decoded_fake(*arguments[:7]), *arguments[7:])


# -- on a GPU: of the same arguments, in the order of the schemas


@dataclass(frozen=True)
class KernelOp:
    """An op as launches of generated kernels.

    plan: makes the plan for a call's arguments (kernels/launch.py), which serves all calls whose tensors are of the same kind.
    given: what the plan is called with. single: it returns one tensor.
    """

    plan: Callable[..., Any]
    given: Callable[..., tuple[Any, ...]]
    single: bool = False

    def __call__(self, *arguments: Any) -> Any:
        made = self.plan(*arguments)(*self.given(*arguments))
        return made[0] if self.single else tuple(made)


def _matrix(x: Tensor, amax: Tensor | None, quantizer: str, rotation: str, *draws: Any) -> tuple[Any, ...]:
    """draws: the seed, the sites of the rounding and of the signs, and others."""
    return (x,), amax, *draws[:3]


def _codes(codes: Tensor, scales: Tensor, factor: Tensor | None, *others: Any) -> tuple[Any, ...]:
    """others: the rest of PACKED, then those of `_matrix` but its first."""
    _, amax, *draws = _matrix(codes, *others[4:])
    return requantize.readable_tensors(codes, scales, factor), amax, *draws


def _rotate_quantize_plan(x: Tensor, amax: Any, quantizer: str, rotation: str, seed: Any, *others: Any) -> Any:
    _, _, native_draws, *swizzled = others
    return kernels.quantize_plan(x, *_specs(quantizer, rotation), seed, swizzled == [True], native_draws)


def _fake_quantize_plan(x: Tensor, amax: Any, quantizer: str, rotation: str, seed: Any, *others: Any) -> Any:
    _, _, native_draws, dtype, *factor = others
    q, r = _specs(quantizer, rotation)
    return kernels.fake_quantize_plan(x, q, r, seed, dtype, bool(q.outer), native_draws, *factor)


def _fake_quantize_given(*arguments: Any) -> tuple[Any, ...]:
    _, *others = _matrix(*arguments)
    x, factor = arguments[0], arguments[9] if len(arguments) > 9 else None
    return (x,) if factor is None else (x, factor), *others


def _rotated_amax_plan(x: Tensor, rotation: str, seed: Tensor | None, signs_site: int) -> Any:
    return kernels.amax_plan(x, ops.rotation(rotation), seed)


def _packed(*arguments: Any) -> requantize.Packed:
    """Of PACKED's arguments."""
    codes, scales, factor, source, *read = arguments
    return requantize.Packed(codes, scales, factor, ops.quantizer(source), *read)


def _decode_plan(codes: Tensor, scales: Tensor, factor: Any, source: str, columns: int, dtype: torch.dtype) -> Any:
    return requantize.plan("read_values", _packed(codes, scales, factor, source, columns, dtype, False), (dtype,))


def _requantize_plan(*arguments: Any) -> Any:
    _, quantizer, rotation, seed, _, _, native_draws = arguments[7:]
    return requantize.plan("packed", _packed(*arguments[:7]), (False, native_draws), *_specs(quantizer, rotation), seed)


def _fake_requantize_plan(*arguments: Any) -> Any:
    _, quantizer, rotation, seed, _, _, native_draws, dtype = arguments[7:]
    q, r = _specs(quantizer, rotation)
    return requantize.plan("decoded", _packed(*arguments[:7]), (dtype, bool(q.outer), native_draws), q, r, seed)


def _quantize_masked_plan(x: Tensor, amax: Any, quantizer: str, rotation: str, seed: Any, *others: Any) -> Any:
    _, _, native_draws = others
    return masks.quantize_plan(x, *_specs(quantizer, rotation), seed, native_draws)


def _unrotate_masked_plan(
    y: Tensor, mask: Tensor | None, rotation: str, seed: Any, site: int, columns: int, dtype: torch.dtype
) -> Any:
    return masks.unrotate_plan(masks.readable_tensors(y, mask), ops.rotation(rotation), seed, columns, dtype)


def _unrotate_given(y: Tensor, mask: Tensor | None, rotation: str, seed: Any, site: int, *others: Any) -> tuple[Any, ...]:
    return masks.readable_tensors(y, mask), None, seed, site, site


KERNELS: dict[str, KernelOp] = {
    "rotate_quantize": KernelOp(_rotate_quantize_plan, _matrix),
    "fake_quantize": KernelOp(_fake_quantize_plan, _fake_quantize_given),
    "rotated_amax": KernelOp(_rotated_amax_plan, lambda x, rotation, seed, site: ((x,), None, seed, site, site), True),
    "decode": KernelOp(_decode_plan, lambda *given: (requantize.readable_tensors(*given[:3]),), True),
    "requantize": KernelOp(_requantize_plan, _codes),
    "fake_requantize": KernelOp(_fake_requantize_plan, _codes),
    "quantize_masked": KernelOp(_quantize_masked_plan, _matrix),
    "unrotate_masked": KernelOp(_unrotate_masked_plan, _unrotate_given, True),
}


for _name, _schema, _impl, _fake in (
    (
        "rotate_quantize",
        f"({ARGUMENTS}, bool swizzled=False) -> (Tensor, Tensor, Tensor)",
        _rotate_quantize,
        _rotate_quantize_fake,
    ),
    ("rotated_amax", "(Tensor x, str rotation, Tensor? seed, int signs_site) -> Tensor", _rotated_amax, _rotated_amax_fake),
    (
        "fake_quantize",
        f"({ARGUMENTS}, ScalarType dtype, Tensor? factor=None) -> (Tensor, Tensor)",
        _fake_quantize,
        _fake_quantize_fake,
    ),
    (
        "decode",
        "(Tensor codes, Tensor scales, Tensor? factor, str source, SymInt columns, ScalarType dtype) -> Tensor",
        _decode,
        _decode_fake,
    ),
    ("requantize", f"({PACKED}, {DRAWS}) -> (Tensor, Tensor, Tensor)", _requantize, _requantize_fake),
    ("quantize_masked", f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)", _quantize_masked, _quantize_masked_fake),
    (
        "unrotate_masked",
        "(Tensor y, Tensor? mask, str rotation, Tensor? seed, int site, SymInt columns, ScalarType dtype) -> Tensor",
        _unrotate_masked,
        _unrotate_masked_fake,
    ),
    (
        "fake_requantize",
        f"({PACKED}, {DRAWS}, ScalarType dtype) -> (Tensor, Tensor)",
        _fake_requantize,
        _fake_requantize_fake,
    ),
):
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, KERNELS[_name], "CUDA")
    torch.library.register_fake(f"fp4::{_name}", _fake, lib=LIBRARY)
