"""Quantized tensors outside a compiled graph: look at one, measure its error, count its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4.runtime import reference
from fp4.runtime.layout import unpack
from fp4.runtime.rng import MASK
from fp4.runtime.rounding import ELEMENT_MAX, element_value
from fp4.runtime.spec import Quantizer, Rotation, SpecError

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizationError:
    """How far a quantized tensor is from the values it was made of; NaN where a NaN or Inf was among them.

    mse: mean squared error. relative_mse: squared error over squared norm. sqnr_db: -10 log10 of that, dB. underflow: share of
    the non-zero elements decoded to zero. saturation: share of the elements cut to the largest code. cosine:
    of the angle between values and decoded values.
    """

    mse: float
    relative_mse: float
    sqnr_db: float
    underflow: float
    saturation: float
    cosine: float


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor as codes and scales, quantized along its last dimension.

    codes, scales, tensor_scale: of the 2-D operand (rows, last dimension), as ``reference.quantize`` returns them.
    shape, dtype: of the tensor quantized. seed, site: what its random draws came from; seed is None when there were none.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    quantizer: Quantizer
    rotation: Rotation | None
    shape: torch.Size
    dtype: torch.dtype
    seed: Tensor | None
    site: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and tensor scale or outer scales, padding to whole blocks included."""
        return self.codes.nbytes + self.scales.nbytes + self.tensor_scale.nbytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits of codes, block and outer scales for each element of `shape`, padding included; 0 for an empty tensor."""
        outer = self.tensor_scale.nbytes if self.quantizer.has_outer_scale else 0
        return 8 * (self.codes.nbytes + self.scales.nbytes + outer) / max(self.shape.numel(), 1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The decoded values, of `dtype` (the original one when None).

        With a rotation they are in the rotated space, and the last dimension is padded to a multiple of the rotation's size.
        """
        columns = self._columns
        decoded = reference.dequantize(
            self.codes, self.scales, self.tensor_scale, self.quantizer, columns, self.dtype if dtype is None else dtype
        )
        return decoded.reshape(*self.shape[:-1], columns)

    def error(self, x: Tensor) -> QuantizationError:
        """The error against `x`, the tensor quantized; `x` is rotated as that one was. Sums are FP64.

        Raises ValueError if the shape of `x` is another.
        """
        if x.shape != self.shape:
            raise ValueError(f"error: x is {tuple(x.shape)}, the quantized tensor {tuple(self.shape)}; pass the same tensor")
        rows = _rows(x)
        if self.rotation is not None:
            rows = reference.rotate(rows, self.rotation, self.seed, self.site)
        value, decoded = rows.double(), self.dequantize(torch.float32).double().reshape(rows.shape)
        codes = unpack(self.codes) if self.quantizer.packed else self.codes
        element = element_value(codes, self.quantizer.element_dtype)[:, : rows.shape[1]]
        clipped = (element.abs() == ELEMENT_MAX[self.quantizer.element_dtype]) & (value.abs() > decoded.abs())
        count = max(value.numel(), 1)
        squared, norm, decoded_norm = (float((t * t).sum()) for t in (decoded - value, value, decoded))
        relative = squared / norm if norm else 0.0
        nonzero = value != 0
        return QuantizationError(
            mse=squared / count,
            relative_mse=relative,
            sqnr_db=-10 * math.log10(relative) if relative else math.inf,
            underflow=float((nonzero & (decoded == 0)).sum()) / max(int(nonzero.sum()), 1),
            saturation=float(clipped.sum()) / count,
            cosine=float((value * decoded).sum()) / math.sqrt(norm * decoded_norm) if norm * decoded_norm else 1.0,
        )

    @property
    def _columns(self) -> int:
        last = self.shape[-1]
        return last if self.rotation is None else -(-last // self.rotation.size) * self.rotation.size


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def quantize(
    x: Tensor, quantizer: Quantizer, *, rotation: Rotation | None = None, seed: int | Tensor | None = None, site: int = 0
) -> QuantizedTensor:
    """Quantize `x` along its last dimension, rotated first when `rotation` is given.

    x: BF16, FP16 or FP32 of any rank from 1; leading dimensions are flattened into rows. seed: an integer or one int64 element;
    None draws one from the default generator if the quantizer or the rotation is random. site: which op of a graph draws.

    Raises TypeError for another dtype of `x` or `seed`, ValueError for rank 0, SpecError for MS-EDEN without fresh signs.
    """
    if x.dtype not in _FLOATS:
        raise TypeError(f"quantize: x is {x.dtype}; pass bfloat16, float16 or float32, e.g. x.float()")
    if x.dim() == 0:
        raise ValueError("quantize: x has no dimension to quantize along; write x.reshape(1)")
    if quantizer.rounding == "ms_eden" and (rotation is None or rotation.signs != "fresh"):
        raise SpecError(
            f"quantize: {quantizer} needs a rotation with fresh signs, not {rotation}: with fixed signs the bias does not "
            "average out. Write rotation=Rotation(size=128, signs='fresh')"
        )
    random = quantizer.needs_seed or (rotation is not None and rotation.needs_seed)
    chosen = _seed(seed, x.device) if random else None
    rows = _rows(x)
    if rotation is not None:
        rows = reference.rotate(rows, rotation, chosen, site)
    codes, scales, tensor_scale = reference.quantize(rows, quantizer, None, chosen, site)
    return QuantizedTensor(codes, scales, tensor_scale, quantizer, rotation, x.shape, x.dtype, chosen, site)


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(0, MASK + 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        return torch.full((1,), seed & MASK, dtype=torch.int64, device=device)
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(f"quantize: seed is {seed.dtype} of {seed.numel()} elements; pass an integer or one int64 element")
    return seed
