"""Intel's FP4 All the Way (2505.19115): E2M1 in blocks of 16, stochastic rounding where it helps.

    GEMM    first operand           second operand            rotation
    fprop   X  1x16 RNE             W 1x16 RNE                none
    dgrad   dY 1x16 SR              W 1x16 RNE                none
    wgrad   dY 1x16 SR, tokens      X 1x16 SR, tokens         none

Every operand is quantized from the original. Phase "qaf" (quantization-aware fine-tuning): the forward as it is, the whole
backward in BF16, the learning rate warmed up again. The paper's signal for it: the gradient norm falls below sqrt(3) times
the norm of the quantization noise in the gradient (``fp4 train --switch-at``).

Paper and code: no code is released. The format sweep is `scale` (E1M6 to E8M0) and `block`. With E4M3 the paper's NVFP4 has a
tensor scale; SR's block scale uses the plain factor 6 (`range_guard` for 6*16/17).
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Policy, usual_rules
from fp4.runtime.spec import NVFP4


def all_the_way(
    *,
    scale: str = "e4m3",
    block: int = 16,
    tensor_scale: bool = True,
    stochastic: tuple[str, ...] = ("dgrad dY", "wgrad dY", "wgrad X"),
    range_guard: bool = False,
    gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad"),
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """FP4 All the Way (2505.19115): E2M1 in blocks of 16 with E4M3 scales, SR on dY and on wgrad's X; phase qaf.

    scale: format of the block scale. block: elements a scale, 8 to 128. tensor_scale: keep the FP32 scale (e8m0 has none).
    stochastic: operands rounded stochastically, "GEMM operand" each. range_guard: factor 6*16/17 in their block scale. gemms:
    those quantized. keep_heads, high_precision_tail: keep head and routers, and the last share of the linears, in BF16.
    """

    def q(operand: str) -> NVFP4:
        random = operand in stochastic
        return NVFP4(
            block=(1, block),
            rounding="stochastic" if random else "nearest",
            range_guard=range_guard and random,
            scale=scale,
            tensor_scale=tensor_scale and scale != "e8m0",
        )

    linear = LinearPrecision(
        fprop=GemmPrecision(q("fprop X"), q("fprop W")),
        dgrad=GemmPrecision(q("dgrad dY"), q("dgrad W")),
        wgrad=GemmPrecision(q("wgrad dY"), q("wgrad X")),
    ).only(gemms)
    rules = usual_rules(keep_heads, high_precision_tail)
    policy = Policy("all_the_way", linear, rules)
    return policy.with_phase("qaf", Policy("qaf", linear.only(("fprop",)), rules))
