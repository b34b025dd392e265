"""The three GEMMs of a stack of experts, each expert a linear of its own: blocks, scales and draws never cross a group.

With X (T, K) tokens sorted by expert, W (E, N, K), dY (T, N) and `offs` (E,), the end of each expert's rows:

    fprop  Y[e]  = X[e] W[e]^T     contracts K
    dgrad  dX[e] = dY[e] W[e]      contracts N
    wgrad  dW[e] = dY[e]^T X[e]    contracts the expert's rows

Group sizes are data, so this is one opaque op that loops over the experts with the oracle's functions: an exact emulation, with
one read of `offs` on the host. Rows after the last group are zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from fp4.runtime import reference
from fp4.runtime.spec import Quantizer, Rotation

ROLES = ("fprop", "dgrad", "wgrad")
SITES = 16  # draw sites an expert has: operand i of role r at 2 r + i, the signs of role r at 8 + r


@dataclass(frozen=True)
class GroupedPrecision:
    """Precision of one GEMM of every expert, as the texts of its quantizers and rotations ("" for none).

    first, second, rotation: of the role's operands. copy: the quantizer fprop had for the second operand, where the backward
    reads that copy. forward_rotation: fprop's. clip: the quantizer fprop had for the tensor whose gradient this is, where
    nothing flows to what it clipped.
    """

    role: str
    first: str = ""
    second: str = ""
    rotation: str = ""
    copy: str = ""
    forward_rotation: str = ""
    clip: str = ""

    def __str__(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value})

    @staticmethod
    @cache
    def parse(text: str) -> GroupedPrecision:
        return GroupedPrecision(**json.loads(text))


@dataclass(frozen=True)
class _Operand:
    value: Tensor
    scale: Tensor | None = None


def grouped_mm(
    first: Tensor,
    second: Tensor,
    offs: Tensor,
    clipped: Tensor | None,
    precision: str,
    seed: Tensor | None,
    site: int,
    dtype: torch.dtype,
) -> Tensor:
    """One GEMM of every expert.

    first: X (fprop) or dY. second: W (E, N, K) (fprop, dgrad) or X (wgrad). offs: (E,) int32, ends of the groups.
    clipped: X (dgrad) or W (wgrad) where the gradient is clipped. site: first draw site of expert 0; each expert has 16.
    Returns (T, N), (T, K) or (E, N, K) of `dtype`.
    """
    p = GroupedPrecision.parse(precision)
    wgrad = p.role == "wgrad"
    experts = offs.shape[0]
    if wgrad:
        out = first.new_zeros((experts, first.shape[1], second.shape[1]), dtype=dtype)
    else:
        columns = second.shape[1] if p.role == "fprop" else second.shape[2]
        out = first.new_zeros((first.shape[0], columns), dtype=dtype)
    for e, rows in _groups(offs, first.shape[0]):
        a, b = first[rows], second[rows] if wgrad else second[e]
        mask_of = None if clipped is None else clipped[e] if wgrad else clipped[rows]
        y = _one(a.t() if wgrad else a, b, mask_of, p, seed, site + SITES * e, dtype)
        out[e if wgrad else rows] = y
    return out


def _groups(offs: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which."""
    start = 0
    for e, end in enumerate(offs.tolist()):
        if not start <= end <= tokens:
            raise ValueError(
                f"fp4::grouped_mm: offs {offs.tolist()} of {tokens} rows; write ends that rise from 0 to at most that"
            )
        if end > start:
            yield e, slice(start, end)
        start = end


def _one(
    first: Tensor,
    other: Tensor,
    clipped: Tensor | None,
    p: GroupedPrecision,
    seed: Tensor | None,
    site: int,
    dtype: torch.dtype,
) -> Tensor:
    """One expert's GEMM. first (R, C). other: as the model has it; W or X of the backward is contracted along its rows."""
    role, letter = ROLES.index(p.role), 1 if p.role == "dgrad" else 0  # fprop's operand that a backward reads: W is 1, X is 0
    draw, signs, forward_signs = site + 2 * role, site + 8 + role, site + 8
    second, copied = other if role == 0 else other.t(), None
    if p.copy:
        rotated = _rotate(other, p.forward_rotation, seed, forward_signs)
        copy = _quantize(rotated, p.copy, seed, site + letter)
        second, copied = copy.value.t(), copy.scale
    a = _quantize(_rotate(first, p.rotation, seed, signs), p.first, seed, draw)
    b = _quantize(_rotate(second, p.rotation, seed, signs), p.second, seed, draw + 1)
    y = reference.mm(a.value, b.value, _product(a.scale, b.scale, copied), None, dtype)
    own = 0 if p.role == "dgrad" else 1  # fprop's operand whose gradient this is
    if p.clip:
        assert clipped is not None
        q = Quantizer.parse(p.clip)
        rotated = _rotate(clipped, p.forward_rotation, seed, forward_signs)
        _, scales, _ = reference.quantize(rotated, q, None, seed, site + own)
        y = reference.apply_mask(y, reference.clip_mask(rotated, scales, q))
    if p.copy and p.forward_rotation:  # the gradient is in fprop's rotated space
        y = reference.unrotate(y, Rotation.parse(p.forward_rotation), seed, forward_signs, other.shape[1], dtype)
    return y


def _rotate(x: Tensor, rotation: str, seed: Tensor | None, site: int) -> Tensor:
    return reference.rotate(x, Rotation.parse(rotation), seed, site) if rotation else x


def _quantize(x: Tensor, quantizer: str, seed: Tensor | None, site: int) -> _Operand:
    if not quantizer:
        return _Operand(x)
    q = Quantizer.parse(quantizer)
    codes, scales, factor = reference.quantize(x, q, None, seed if q.needs_seed else None, site)
    dtype = torch.bfloat16 if q.exact_in_bf16 else torch.float32
    if q.outer:
        return _Operand(reference.dequantize(codes, scales, factor, q, x.shape[1], dtype))
    return _Operand(reference.decode(codes, scales, q, x.shape[1], dtype), factor if q.has_tensor_scale else None)


def _product(*factors: Tensor | None) -> Tensor | None:
    result: Tensor | None = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else result * factor
    return result


def grouped_mm_fake(
    first: Tensor,
    second: Tensor,
    offs: Tensor,
    clipped: Tensor | None,
    precision: str,
    seed: Tensor | None,
    site: int,
    dtype: torch.dtype,
) -> Tensor:
    shapes: dict[str, Callable[[], tuple[int | torch.SymInt, ...]]] = {
        "fprop": lambda: (first.shape[0], second.shape[1]),
        "dgrad": lambda: (first.shape[0], second.shape[2]),
        "wgrad": lambda: (offs.shape[0], first.shape[1], second.shape[1]),
    }
    return first.new_empty(shapes[GroupedPrecision.parse(precision).role](), dtype=dtype)
