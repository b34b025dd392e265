"""The ``fp4::`` operators: what a rewritten graph calls, with the same meaning on every device.

Functional, contiguous outputs, no implicit randomness. A specification travels as its text (``str(quantizer)``). They have no
derivative: a graph gets its backward before they are put in, so differentiating through one is an error, not a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp4.runtime import layout, reference, rng
from fp4.runtime.grouped import grouped_mm, grouped_mm_fake
from fp4.runtime.layout import Size, ceil_div
from fp4.runtime.spec import Quantizer, Rotation

quantizer = lru_cache(maxsize=None)(Quantizer.parse)
rotation = lru_cache(maxsize=None)(Rotation.parse)

LIBRARY = torch.library.Library("fp4", "DEF")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _check_operand(op: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"fp4::{op}: x has {x.dim()} dimensions; flatten it to (rows, contracted dimension)")
    _check_dtype(op, x)


def _check_dtype(op: str, x: Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise TypeError(f"fp4::{op}: x is {x.dtype}; write x.float() for FP32, or pass bfloat16 or float16")


def _amax(x: Tensor) -> Tensor:
    _check_dtype("amax", x)
    return reference.amax(x)


def _amax_fake(x: Tensor) -> Tensor:
    _check_dtype("amax", x)
    return x.new_empty((), dtype=torch.float32)


def _rotate(x: Tensor, rotation_text: str, seed: Tensor | None, site: int) -> Tensor:
    _check_operand("rotate", x)
    return reference.rotate(x, rotation(rotation_text), seed, site).contiguous()


def _rotate_fake(x: Tensor, rotation_text: str, seed: Tensor | None, site: int) -> Tensor:
    _check_operand("rotate", x)
    r = rotation(rotation_text)
    return x.new_empty((x.shape[0], ceil_div(x.shape[1], r.size) * r.size), dtype=torch.bfloat16 if r.bf16 else torch.float32)


def _quantize(
    x: Tensor, amax: Tensor | None, quantizer_text: str, seed: Tensor | None, site: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check_operand("quantize", x)
    codes, scales, tensor_scale = reference.quantize(x, quantizer(quantizer_text), amax, seed, site)
    return codes.contiguous(), scales.contiguous(), tensor_scale


def _quantize_fake(
    x: Tensor, amax: Tensor | None, quantizer_text: str, seed: Tensor | None, site: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check_operand("quantize", x)
    return quantized_fake(x, x.shape[0], x.shape[1], quantizer(quantizer_text))


def quantized_fake(x: Tensor, rows: Size, columns: Size, q: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, scales and tensor scale (or outer scales) of a quantized (rows, columns) operand, on the device of `x`."""
    row_blocks, column_blocks = ceil_div(rows, q.block[0]), ceil_div(columns, q.block[1])
    width = column_blocks * (q.block[1] // 2 if q.packed else q.block[1])
    scale_dtype = torch.float32 if q.scale_format == "fp32" else torch.uint8
    outer = (rows, ceil_div(columns, q.outer)) if q.has_outer_scale else ()
    return (
        x.new_empty((rows, width), dtype=torch.uint8),
        x.new_empty((row_blocks, column_blocks), dtype=scale_dtype),
        x.new_empty(outer, dtype=torch.float32),
    )


def _dequantize(
    codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, quantizer_text: str, columns: int, dtype: torch.dtype
) -> Tensor:
    q = quantizer(quantizer_text)
    if tensor_scale is None:
        return reference.decode(codes, scales, q, columns, dtype).contiguous()
    return reference.dequantize(codes, scales, tensor_scale, q, columns, dtype).contiguous()


def _dequantize_fake(
    codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, quantizer_text: str, columns: Size, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


def _unrotate(y: Tensor, rotation_text: str, seed: Tensor | None, site: int, columns: int, dtype: torch.dtype) -> Tensor:
    _check_operand("unrotate", y)
    return reference.unrotate(y, rotation(rotation_text), seed, site, columns, dtype).contiguous()


def _unrotate_fake(y: Tensor, rotation_text: str, seed: Tensor | None, site: int, columns: Size, dtype: torch.dtype) -> Tensor:
    _check_operand("unrotate", y)
    return y.new_empty((y.shape[0], columns), dtype=dtype)


def _clip_mask(x: Tensor, scales: Tensor, quantizer_text: str) -> Tensor:
    _check_operand("clip_mask", x)
    return reference.clip_mask(x, scales, quantizer(quantizer_text)).contiguous()


def _clip_mask_fake(x: Tensor, scales: Tensor, quantizer_text: str) -> Tensor:
    _check_operand("clip_mask", x)
    width = quantizer(quantizer_text).block[1]
    return x.new_empty((x.shape[0], ceil_div(x.shape[1], width) * (width // 8)), dtype=torch.uint8)


def _apply_mask(y: Tensor, mask: Tensor) -> Tensor:
    _check_operand("apply_mask", y)
    return reference.apply_mask(y, mask).contiguous()


def _apply_mask_fake(y: Tensor, mask: Tensor) -> Tensor:
    _check_operand("apply_mask", y)
    return y.new_empty(y.shape)


def _mm(a: Tensor, b: Tensor, alpha: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return reference.mm(a, b, alpha, bias, dtype)


def _mm_fake(a: Tensor, b: Tensor, alpha: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    torch._check(a.shape[1] == b.shape[1], lambda: f"fp4::mm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; K is last in both")
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _product_fake(a: Tensor, b: Tensor, alpha: Tensor | None = None) -> Tensor:
    return _mm_fake(a, b, alpha, None, torch.bfloat16)


def _swizzle_fake(scales: Tensor) -> Tensor:
    tiles = ceil_div(scales.shape[0], layout.TILE_ROWS) * ceil_div(scales.shape[1], layout.TILE_COLUMNS)
    return scales.new_empty((tiles * layout.TILE_BYTES,))


def _swizzle_rows_fake(scales: Tensor, rows: Size, block_rows: int) -> Tensor:
    tiles = ceil_div(rows, layout.TILE_ROWS) * ceil_div(scales.shape[1], layout.TILE_COLUMNS)
    return scales.new_empty((tiles * layout.TILE_BYTES,))


def _transpose_codes_fake(codes: Tensor, columns: Size, block: int, packed: bool) -> Tensor:
    return codes.new_empty((columns, ceil_div(codes.shape[0], block) * (block // 2 if packed else block)))


def _unswizzle_fake(data: Tensor, rows: Size, columns: Size) -> Tensor:
    return data.new_empty((rows, columns))


def _reduce_amax(amax: Tensor, groups: Sequence[str]) -> Tensor:
    for group in groups:
        amax = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(amax, "max", group))
    return amax


def _reduce_amax_fake(amax: Tensor, groups: Sequence[str]) -> Tensor:
    return torch.empty_like(amax)


def _locate_fake(seed: Tensor, rows: Size, row: int, columns: int, column: int) -> Tensor:
    return seed.new_empty((3,))


def _no_backward(op: str) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"fp4::{op} has no derivative. Train through torch.compile(model, backend='fp4'), which puts these ops in after "
            "the backward exists, or call it on x.detach()"
        )

    return backward


LOWERED = ("product",)  # put into graphs that have their backward already: autograd's part of a call would be for nothing
_OPS: tuple[tuple[str, str, Any, Any], ...] = (
    ("amax", "(Tensor x) -> Tensor", _amax, _amax_fake),
    ("rotate", "(Tensor x, str rotation, Tensor? seed, int site) -> Tensor", _rotate, _rotate_fake),
    (
        "quantize",
        "(Tensor x, Tensor? amax, str quantizer, Tensor? seed, int site) -> (Tensor, Tensor, Tensor)",
        _quantize,
        _quantize_fake,
    ),
    (
        "dequantize",
        "(Tensor codes, Tensor scales, Tensor? tensor_scale, str quantizer, SymInt columns, ScalarType dtype) -> Tensor",
        _dequantize,
        _dequantize_fake,
    ),
    (
        "unrotate",
        "(Tensor y, str rotation, Tensor? seed, int site, SymInt columns, ScalarType dtype) -> Tensor",
        _unrotate,
        _unrotate_fake,
    ),
    ("reduce_amax", "(Tensor amax, str[] groups) -> Tensor", _reduce_amax, _reduce_amax_fake),
    ("locate", "(Tensor seed, SymInt rows, int row, int columns, int column) -> Tensor", rng.locate, _locate_fake),
    ("clip_mask", "(Tensor x, Tensor scales, str quantizer) -> Tensor", _clip_mask, _clip_mask_fake),
    ("apply_mask", "(Tensor y, Tensor mask) -> Tensor", _apply_mask, _apply_mask_fake),
    ("mm", "(Tensor a, Tensor b, Tensor? alpha, Tensor? bias, ScalarType dtype) -> Tensor", _mm, _mm_fake),
    ("product", "(Tensor a, Tensor b, Tensor? alpha=None) -> Tensor", reference.product, _product_fake),
    (
        "grouped_mm",
        "(Tensor first, Tensor second, Tensor offs, Tensor? clipped, str precision, Tensor? seed, int site, ScalarType dtype) "
        "-> Tensor",
        grouped_mm,
        grouped_mm_fake,
    ),
    ("swizzle", "(Tensor scales) -> Tensor", layout.swizzle, _swizzle_fake),
    ("swizzle_rows", "(Tensor scales, SymInt rows, int block_rows) -> Tensor", layout.swizzle_rows, _swizzle_rows_fake),
    (
        "transpose_codes",
        "(Tensor codes, SymInt columns, int block, bool packed) -> Tensor",
        layout.transpose_codes,
        _transpose_codes_fake,
    ),
    ("unswizzle", "(Tensor data, SymInt rows, SymInt columns) -> Tensor", layout.unswizzle, _unswizzle_fake),
)


def draw_seed(device: torch.device, groups: Sequence[str] | None = None) -> Tensor:
    seed = torch.randint(0, 2**31 - 1, (1,), dtype=torch.int64, device=device)
    dist: Any = torch.distributed
    if dist.is_available() and dist.is_initialized():
        seed = rng.reseed(seed, dist.get_rank())
        for group in groups or ():
            dist.broadcast(seed, group=dist.distributed_c10d._resolve_process_group(group), group_src=0)
    return seed


def _seed_fake(device: torch.device, groups: Sequence[str] | None = None) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device=device)


# The graph's one draw from the default generator of its device. An op of ours with a side effect, so that the partitioner
# counts it as forward's even where forward's result does not depend on it: it would draw again in backward, and forward would
# have rotated an operand with other signs than backward.
# In a distributed run ranks draw differently, except those of `groups`, who all take the draw of their groups' first rank.
LIBRARY.define("seed(Device device, str[]? groups=None) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.impl("seed", draw_seed, "CompositeExplicitAutograd")
torch.library.register_fake("fp4::seed", _seed_fake, lib=LIBRARY)
torch.fx.node.has_side_effect(torch.ops.fp4.seed.default)

for _name, _schema, _impl, _fake in _OPS:
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{_name}", _fake, lib=LIBRARY)
    if _name not in LOWERED:
        torch.library.register_autograd(f"fp4::{_name}", _no_backward(_name), lib=LIBRARY)
