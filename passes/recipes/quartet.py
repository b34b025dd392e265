"""Quartet (2505.14669): MXFP4 throughout, QuEST forward with a clip mask, range-fitted backward.

    GEMM    first operand              second operand                            rotation
    fprop   X  1x32 QuEST, RNE         W 1x32 QuEST, RNE                         H32, no signs
    dgrad   dY range_fit               W: fprop's codes, decoded, W^T, range_fit  H32, fresh signs
    wgrad   dY range_fit, tokens       X: fprop's codes, decoded, X^T, range_fit  H32, fresh signs

The forward copies are in the forward's rotated space, so dX and dW are too: each is masked where its tensor was clipped, then
rotated back. Forward saves codes, scales and one bit an element.

Paper and code: the backward rounds to nearest in the released kernels and in the later paper, stochastically in the first
(`gradient_rounding`). The factor 1/9 of the released GEMM is the product of the operands' own 1/3.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Operand, Policy, usual_rules
from fp4.runtime.spec import MXFP4, Rotation


def quartet(
    *,
    gradient_rounding: str = "nearest",
    forward_rotation: bool = True,
    clip_gradient: bool = True,
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """Quartet (2505.14669): MXFP4 by QuEST over H32 forward, range_fit over H32 with fresh signs backward, clip masks.

    gradient_rounding: of all four backward operands, nearest or stochastic. forward_rotation: rotate fprop's operands.
    clip_gradient: no gradient to what the forward clipped. keep_heads, high_precision_tail: keep head and routers, and the
    last share of the linears, in BF16.
    """
    forward = Operand(MXFP4(scale_rule="quest"), clip_gradient=clip_gradient)
    backward = MXFP4(scale_rule="range_fit", rounding=gradient_rounding)
    gemm = GemmPrecision(backward, Operand(backward, source="forward"), rotation=Rotation(32, signs="fresh", bf16=False))
    fprop = GemmPrecision(forward, forward, rotation=Rotation(32, bf16=False) if forward_rotation else None)
    rules = usual_rules(keep_heads, high_precision_tail)
    return Policy("quartet", LinearPrecision(fprop, gemm, gemm), rules)
