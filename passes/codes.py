"""The quantized operands of an ``fp4::mm``, as codes whose contracted dimension is contiguous: what tensor cores read."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fp4.compiler.graph import Builder, aten, is_transpose
from fp4.runtime.spec import Quantizer

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class Codes:
    """A quantized operand of an ``fp4::mm``. transposed: the matrix that was quantized is its transpose."""

    codes: Node
    scales: Node
    quantizer: Quantizer
    columns: Any
    transposed: bool

    def contiguous(self, build: Builder) -> tuple[Node, Node]:
        """Codes and block scales of the operand itself.

        A matrix in square blocks is quantized again as its transpose, which has the same codes; saved codes are transposed.
        """
        codes, scales, q = self.codes, self.scales, self.quantizer
        if not self.transposed:
            return codes, scales
        made: Any = codes.args[0] if codes.target is operator.getitem else None
        if made is not None and made.target is fp4.quantize.default:
            return _quantized_transpose(build, made)
        codes = build.call(fp4.transpose_codes.default, codes, self.columns, q.block[0], q.packed)
        return codes, build.call(aten.permute.default, scales, [1, 0])


def codes_of(node: Any) -> Codes | None:
    """The codes that an operand is decoded from; None where it is not."""
    transposed = is_transpose(node)
    decode = node.args[0] if transposed else node
    if not isinstance(decode, Node) or decode.target is not fp4.dequantize.default:
        return None
    codes, scales, _, text, columns, _ = decode.args
    quantizer = Quantizer.parse(str(text))
    if transposed and not quantizer.transposable:
        return None
    return Codes(codes, scales, quantizer, columns, transposed)  # type: ignore[arg-type]


def contracted(build: Builder, a: Codes, b: Codes, first: Node) -> Any:
    """The contracted dimension K of a GEMM, without its padding. first: the operand that `a` is of."""
    return a.columns if not a.transposed else b.columns if not b.transposed else build.size(first, 1)


def _quantized_transpose(build: Builder, quantize: Node) -> tuple[Node, Node]:
    """Codes and scales of the transpose of what `quantize` quantizes."""
    matrix, amax, spec, seed, site = quantize.args
    transpose = build.transposed(matrix)  # type: ignore[arg-type]
    if isinstance(amax, Node) and amax.target is fp4.amax.default and amax.args[0] is matrix:
        amax = build.call(fp4.amax.default, transpose)  # the same, and the quantize kernel's own
    codes, scales, _ = build.outputs(build.call(fp4.quantize.default, transpose, amax, spec, seed, site))
    return codes, scales
