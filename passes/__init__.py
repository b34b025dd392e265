"""Graph passes, one a file, in the order of ``fp4.compiler.pipeline``."""

from __future__ import annotations

from fp4.passes.assign_precision import AssignPrecision
from fp4.passes.canonicalize import Canonicalize
from fp4.passes.insert_quantize import InsertQuantize
from fp4.passes.insert_rotation import InsertRotation
from fp4.passes.lower_collectives import LowerCollectives
from fp4.passes.lower_emulated import LowerEmulated
from fp4.passes.lower_reference import LowerReference
from fp4.passes.requantize import Requantize
from fp4.passes.share_quantized import ShareQuantized
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
LOWERING = (LowerEmulated(), LowerCollectives(), LowerReference())
