"""TetraJet-v2 (2510.27527): NVFP4 with an FP32 scale for every 1x128, stochastic backward on the forward's own codes.

    GEMM    first operand                 second operand                                rotation
    fprop   X  1x16 RNE, outer 1x128      W 1x16 RNE, outer 1x128                       none
    dgrad   dY SR, outer 1x128            W: fprop's codes, decoded, W^T, SR            H16, fresh signs
    wgrad   dY SR, outer 1x128, tokens    X: fprop's codes, decoded, X^T, SR            H16, fresh signs

The outer scale takes the tensor scale's place, so no operand needs an amax of the whole tensor. Not here: the paper's outlier
channels in MXFP8 (OutControl) and its reset of oscillating weights (OsciReset).

Paper and code: the code gives an all-zero block the scale 2^-9; here it is 0, which decodes to the same zeros.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Operand, Policy, usual_rules
from fp4.runtime.spec import NVFP4, Rotation


def tetrajet2(
    *,
    outer: int = 128,
    gradient_rounding: str = "stochastic",
    rotation_size: int = 16,
    requantize: bool = True,
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """TetraJet-v2 (2510.27527): NVFP4 with FP32 scales for 1x128, SR backward over H16 with fresh signs on forward's codes.

    outer: columns that share an FP32 scale; 0 for one scale a tensor. gradient_rounding: of all four backward operands,
    stochastic or nearest. rotation_size: 16 to 256. requantize: the backward's W and X from fprop's codes, else from the
    original. keep_heads, high_precision_tail: keep head and routers, and the last share of the linears, in BF16.
    """
    backward = NVFP4(rounding=gradient_rounding, outer=outer)
    gemm = GemmPrecision(
        backward,
        Operand(backward, source="forward" if requantize else "original"),
        rotation=Rotation(rotation_size, signs="fresh", bf16=False),
    )
    rules = usual_rules(keep_heads, high_precision_tail)
    return Policy("tetrajet2", LinearPrecision(GemmPrecision(NVFP4(outer=outer), NVFP4(outer=outer)), gemm, gemm), rules)
