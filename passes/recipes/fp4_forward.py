"""NVFP4 in the forward pass alone: inference, post-training, and the floor of what a better backward can reach.

    GEMM    first operand              second operand             rotation
    fprop   X  1x16 RNE, four_six      W 1x16 RNE, four_six       none
    dgrad   dY BF16                    W BF16                     none
    wgrad   dY BF16                    X BF16                     none

Four Over Six (2512.02010). The backward reads the original X and W: a straight-through estimator.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Policy, usual_rules
from fp4.runtime.spec import NVFP4


def fp4_forward(
    *, four_six: bool = True, weight_block: tuple[int, int] = (1, 16), keep_heads: bool = True, high_precision_tail: float = 0.0
) -> Policy:
    """NVFP4 forward (2512.02010): four_six weights and activations, BF16 backward.

    four_six: choose each block's scale by its error. weight_block: (1, 16) or (16, 16). keep_heads, high_precision_tail: keep
    head and routers, and the last share of the linears, in BF16.
    """
    fprop = GemmPrecision(NVFP4(four_six=four_six), NVFP4(block=weight_block, four_six=four_six))
    rules = usual_rules(keep_heads, high_precision_tail)
    return Policy("fp4_forward", LinearPrecision(fprop), rules)
