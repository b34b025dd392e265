"""Quartet II (2601.22813): NVFP4 throughout, with an unbiased backward by MS-EDEN.

    GEMM    first operand                second operand                               rotation
    fprop   X  1x16 RNE, four_six        W 1x16 RNE, four_six                         none
    dgrad   dY MS-EDEN                   W: fprop's codes, decoded, W^T, MS-EDEN      H128, fresh signs
    wgrad   dY MS-EDEN, tokens           X: fprop's codes, decoded, X^T, MS-EDEN      H128, fresh signs

Forward saves only codes and scales. No layer stays in BF16 but the head.

Paper and code: the correction of MS-EDEN is per block of 16 (paper v2 and kernels; the research code's is per 128). The
released code draws one sign vector for both backward GEMMs, here each has its own. Its kernels take the tensor scale from the
corrected block scales (here with `posthoc`; else from the amax, algorithm 1) and round scales below 2^-6 to nearest; here
every scale is rounded stochastically. The forward copy is decoded without its tensor scale, which is exact in BF16 and is a
factor of the product instead.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Operand, Policy, usual_rules
from fp4.runtime.spec import NVFP4, Rotation


def quartet2(
    *,
    four_six: bool = True,
    weight_block: tuple[int, int] = (1, 16),
    gradient_rounding: str = "ms_eden",
    rotation_size: int = 128,
    requantize: bool = True,
    posthoc: bool = False,
    gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad"),
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """Quartet II (2601.22813): four_six forward, MS-EDEN backward on the forward's own codes, H128 with fresh signs.

    four_six: choose each forward block's scale by its error. weight_block: of fprop's W, (1, 16) or (16, 16).
    gradient_rounding: of all four backward operands, ms_eden, stochastic (with the 16/17 guard) or nearest. rotation_size: 16
    to 256. requantize: the backward's W and X from fprop's codes, else from the original. posthoc: MS-EDEN's tensor scale from
    the corrected block scales, as the released kernels take it, so that an operand is read once. gemms: those quantized.
    keep_heads, high_precision_tail: keep head and routers, and the last share of the linears, in BF16.
    """
    backward = NVFP4(rounding=gradient_rounding, range_guard=gradient_rounding == "stochastic", posthoc=posthoc)
    gemm = GemmPrecision(
        backward,
        Operand(backward, source="forward" if requantize else "original"),
        rotation=Rotation(rotation_size, signs="fresh", bf16=False),
    )
    forward = GemmPrecision(NVFP4(four_six=four_six), NVFP4(block=weight_block, four_six=four_six))
    rules = usual_rules(keep_heads, high_precision_tail)
    return Policy("quartet2", LinearPrecision(forward, gemm, gemm).only(gemms), rules)
