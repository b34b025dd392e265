"""Graph passes, one a file, in the order of ``fp4.compiler.pipeline``."""

from __future__ import annotations

from typing import Protocol

from torch.fx import Graph

from fp4.compiler.lowering import DEFAULTS, LoweringOptions
from fp4.passes.assign_precision import AssignPrecision
from fp4.passes.canonicalize import Canonicalize
from fp4.passes.fold_scales import FoldScales
from fp4.passes.insert_quantize import InsertQuantize
from fp4.passes.insert_rotation import InsertRotation
from fp4.passes.lower_blackwell import LowerBlackwell
from fp4.passes.lower_collectives import LowerCollectives
from fp4.passes.lower_emulated import LowerEmulated
from fp4.passes.lower_fp8 import LowerFp8
from fp4.passes.lower_products import LowerProducts
from fp4.passes.lower_reference import LowerReference
from fp4.passes.requantize import Requantize
from fp4.passes.share_quantized import ShareQuantized
from fp4.passes.swizzle_scales import SwizzleScales
from fp4.passes.tag_gemms import TagGemms

JOINT_PASSES = (
    Canonicalize(),
    TagGemms(),
    AssignPrecision(),
    InsertRotation(),
    InsertQuantize(),
    Requantize(),
    ShareQuantized(),
)


def lowering(options: LoweringOptions = DEFAULTS) -> tuple[Lowering, ...]:
    """The passes that lower a partitioned graph, in order. Without generated kernels: to the oracle's functions everywhere."""
    rest = (LowerCollectives(), LowerProducts(options.target), LowerReference())
    if not options.kernels:
        return rest
    target = options.target
    quantize = [LowerEmulated(device, options.native_draws) for device in ("cuda", *(["cpu"] if target is not None else []))]
    products: list[Lowering] = [LowerBlackwell(target, options.library), *([] if options.exact else [LowerFp8(target)])]
    return (*products, *quantize, FoldScales(), SwizzleScales(), *rest)


class Lowering(Protocol):
    """A pass over a forward, backward or inference graph."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph) -> bool: ...
