"""AMD's MXFP4 recipe (Pretraining LLMs with MXFP4 on Native FP4 Hardware, 2605.09825).

    GEMM    first operand              second operand             rotation
    fprop   X  1x32 RNE, even          W 1x32 RNE, even           H16, no signs
    dgrad   dY 1x32 RNE, even          W 1x32 RNE, even           H16, no signs
    wgrad   dY 1x32 RNE, even, tokens  X 1x32 RNE, even, tokens   H16, no signs

Every operand is quantized from the original. The paper's ladder: `gemms` in MXFP4, the others in FP8. Phase "fp8" heals
the end of a run in FP8.

Paper and code: the kernels have no stochastic rounding; here it is an option, on dY. Primus-Turbo rotates wgrad alone and has
32x32 blocks of W (`rotate="wgrad"`). FP8 is 1x128 and 128x128 blocks with FP32 scales (DeepSeek-V3's): the paper's own FP8
scaling is not in the public code.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Policy, PolicyError, usual_rules
from fp4.passes.recipes.fp8 import fp8
from fp4.passes.recipes.mxfp8 import mxfp8
from fp4.runtime.spec import MXFP4, Rotation

REST = {"fp8": lambda: fp8().precision, "mxfp8": lambda: mxfp8().precision, "bf16": LinearPrecision}


def mxfp4_h16(
    *,
    gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad"),
    rest: str = "fp8",
    rotate: str = "all",
    size: int = 16,
    signs: str = "none",
    gradient_rounding: str = "nearest",
    scale_rule: str = "even",
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """AMD MXFP4 (2605.09825): RNE with the even scale rule, deterministic H16 on both operands of every GEMM.

    gemms: those in MXFP4. rest: what the others are, fp8, mxfp8 or bf16. rotate: all, wgrad (W in 32x32 blocks then) or none.
    size, signs: of the rotation; none, fixed or fresh. gradient_rounding: of dY, nearest or stochastic. scale_rule: floor,
    even, uos or ceil. keep_heads, high_precision_tail: keep head and routers, and the last share of the linears, in BF16.
    """
    if rest not in REST:
        raise PolicyError(f"rest={rest!r}: write one of {', '.join(REST)}")
    if rotate not in ("all", "wgrad", "none"):
        raise PolicyError(f"rotate={rotate!r}: write all, wgrad or none")
    rotation = Rotation(size, signs=signs, bf16=False)
    outside = rotation if rotate == "all" else None
    x = MXFP4(scale_rule=scale_rule)
    w = MXFP4(scale_rule=scale_rule, block=(32, 32) if rotate == "wgrad" else (1, 32))
    dy = MXFP4(scale_rule=scale_rule, rounding=gradient_rounding, allow_clipping=gradient_rounding == "stochastic")
    full = LinearPrecision(
        fprop=GemmPrecision(x, w, rotation=outside),
        dgrad=GemmPrecision(dy, w, rotation=outside),
        wgrad=GemmPrecision(dy, x, rotation=None if rotate == "none" else rotation),
    )
    others = REST[rest]()
    rules = usual_rules(keep_heads, high_precision_tail)
    policy = Policy("mxfp4_h16", full.only(gemms, others), rules)
    return policy.with_phase("fp8", Policy("fp8", fp8().precision, rules))
