"""On a GPU with block-scaled tensor cores: ``dequantize x2 -> fp4::mm`` becomes ``fp4::scaled_mm`` on the codes themselves.

The operands are never decoded; their scales go in through ``fp4::swizzle_rows``, their tensor scales and the bias are the
epilogue. The contracted dimension must be contiguous, so a W whose transpose has the same codes (square blocks) is quantized
again as the transpose for dgrad; saved codes of it are transposed. A GEMM that the tensor cores do not have is left to
``lower_emulated``; `emulated` says why, and the report repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, aten, fp4_nodes
from fp4.passes.codes import Codes, codes_of, contracted
from fp4.runtime.spec import Quantizer

if TYPE_CHECKING:
    from fp4.kernels.target import Target

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class LowerBlackwell:
    """target: GPU architecture, e.g. "sm_100a", whatever the device of the graph; None: that of the device. library: multiply
    by ``torch.nn.functional.scaled_mm`` where it has the formats (``fp4::library_scaled_mm``)."""

    name: ClassVar[str] = "lower_blackwell"
    target: str | None = None
    library: bool = False

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in list(fp4_nodes(graph, "mm")):
            target = block_scaled_target(node.meta["val"].device, self.target)
            if target is not None:
                changed |= _lower(graph, node, target, self.library)
        if changed:
            graph.eliminate_dead_code()
        return changed


def block_scaled_target(device: torch.device, name: str | None) -> Target | None:
    """The named target, or the device's, where it has block-scaled tensor cores (sm_100, 103, 120, 121), else None."""
    if name is None and device.type != "cuda":
        return None
    from fp4.kernels.target import Target, TargetError, target_of

    try:
        target = Target(name) if name is not None else target_of(device)
    except TargetError:
        return None
    return target if target.capability >= 100 else None


def emulated(
    first: Quantizer | None,
    second: Quantizer | None,
    target: Target,
    library: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Why a GEMM on operands of these quantizers is not block-scaled on the target; empty where it is. dtype: of the result."""
    from fp4.kernels.matmul_library import no_product
    from fp4.kernels.matmul_spec import no_instruction

    return "" if library and not no_product(first, second, dtype) else no_instruction(first, second, target)


def _register() -> None:
    import fp4.kernels.matmul_ops  # noqa: F401  registers the op


def _lower(graph: Graph, node: Node, target: Target, library: bool) -> bool:
    first, second, alpha, bias, dtype = node.args
    a, b = codes_of(first), codes_of(second)
    if a is None or b is None or emulated(a.quantizer, b.quantizer, target, library, dtype):  # type: ignore[arg-type]
        return False
    _register()
    build = Builder(graph, node)
    k = contracted(build, a, b, first)  # type: ignore[arg-type]
    a_codes, a_scales = _inputs(build, a, first)
    b_codes, b_scales = _inputs(build, b, second)
    specs = str(a.quantizer), str(b.quantizer)
    op = fp4.library_scaled_mm.default if library and _in_library(a, b, dtype) else fp4.scaled_mm.default
    product = build.call(op, a_codes, a_scales, b_codes, b_scales, *specs, k, *_factors(node, alpha), bias, dtype)
    product.meta = {**node.meta, "val": product.meta["val"]}
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    return True


def _in_library(a: Codes, b: Codes, dtype: Any) -> bool:
    from fp4.kernels.matmul_library import no_product

    return not no_product(a.quantizer, b.quantizer, dtype)


def _inputs(build: Builder, operand: Codes, node: Any) -> tuple[Node, Node]:
    """Codes with the contracted dimension contiguous, and swizzled scales."""
    codes, scales = operand.contiguous(build)
    return codes, build.call(fp4.swizzle_rows.default, scales, build.size(node, 0), operand.quantizer.block[0])


def _factors(node: Node, alpha: Any) -> tuple[Any, Any]:
    """The two factors of alpha, the operands' tensor scales: the matmul multiplies them by itself."""
    if alpha is not None and alpha.target is aten.mul.Tensor and set(alpha.users) == {node}:
        return alpha.args
    return alpha, None
