"""Amazon's MXFP4 recipe (Training LLMs with MXFP4, 2502.20586): an unbiased MXFP4 backward, the forward in BF16.

    GEMM    first operand                  second operand                rotation
    fprop   X  BF16                        W BF16                        none
    dgrad   dY 1x32 floor, SR of 3/4 dY    W 1x32 floor, SR of 3/4 W     H64, fresh signs
    wgrad   dY, the same, tokens           X, the same, tokens           H64, fresh signs

3/4 keeps the block maximum from clipping; the product is scaled by 16/9, here the product of the operands' own 4/3. One sign
vector a GEMM, shared by its operands. Every operand is quantized from the original.

Paper and code: `forward="fp8"` is the paper's FP8 variant (TransformerEngine's there, 1x128 and 128x128 blocks here).
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Policy, PolicyError, usual_rules
from fp4.passes.recipes.fp8 import fp8
from fp4.runtime.spec import MXFP4, Rotation


def mxfp4_rht(
    *,
    forward: str = "bf16",
    gradient_rounding: str = "stochastic",
    prescale: float = 0.75,
    rotation_size: int = 64,
    rotate: bool = True,
    gemms: tuple[str, ...] = ("dgrad", "wgrad"),
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """Amazon MXFP4 (2502.20586): BF16 forward; SR of 3/4 of the value over H64 with fresh signs on both backward GEMMs.

    forward: bf16 or fp8. gradient_rounding: of all four backward operands, stochastic or nearest. prescale: 0.75, or 1 for
    none, which clips. rotation_size: 16 to 256; rotate: False for no rotation. gemms: those in MXFP4. keep_heads,
    high_precision_tail: keep head and routers, and the last share of the linears, in BF16.
    """
    if forward not in ("bf16", "fp8"):
        raise PolicyError(f"forward={forward!r}: write bf16 or fp8")
    q = MXFP4(
        scale_rule="floor",
        rounding=gradient_rounding,
        prescale=prescale,
        allow_clipping=gradient_rounding == "stochastic" and prescale > 0.75,
    )
    gemm = GemmPrecision(q, q, rotation=Rotation(rotation_size, signs="fresh", bf16=False) if rotate else None)
    fprop = fp8().precision.fprop if forward == "fp8" else GemmPrecision()
    rules = usual_rules(keep_heads, high_precision_tail)
    linear = LinearPrecision(fprop, gemm, gemm)
    return Policy("mxfp4_rht", linear.only(("fprop", *gemms)), rules)
