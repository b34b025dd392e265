"""NVIDIA's NVFP4 pre-training recipe (Pretraining Large Language Models with NVFP4, 2509.25149, section 4).

    GEMM    first operand           second operand                      rotation
    fprop   X  1x16 RNE             W 16x16 RNE                         none
    dgrad   dY 1x16 SR              W 16x16 RNE (fprop's codes, W^T)    none
    wgrad   dY 1x16 SR, tokens      X 1x16 RNE, tokens                  H16, one fixed sign vector, rounded to BF16

High precision: the head (and embeddings, norms, attention, which are no linear ops here), and the last 15 % of the linears
(section 4.1: the last layers are the sensitive ones). Late in training the paper goes back to BF16: phase "bf16", or
"bf16_forward" for fprop alone.

Paper and code: SR uses the plain factor 6, which clips sometimes; `range_guard` is Quartet II's remedy. TransformerEngine
rotates what the paper rotates; its sign vector is ours.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Operand, Policy, usual_rules
from fp4.runtime.spec import NVFP4, Rotation


def nvfp4(
    *,
    high_precision_tail: float = 0.15,
    keep_heads: bool = True,
    weight_block: tuple[int, int] = (16, 16),
    gradient_rounding: str = "stochastic",
    range_guard: bool = False,
    four_six: bool = False,
    wgrad_rotation: Rotation | None = Rotation(16, signs="fixed"),
    wgrad_output: str = "",
    gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad"),
) -> Policy:
    """NVIDIA NVFP4 (2509.25149): 1x16 and 16x16 blocks, SR on gradients, H16 on wgrad, last 15 % in BF16.

    high_precision_tail: share of the last linears kept in BF16. keep_heads: keep head and routers in BF16. weight_block: (16,
    16), or (1, 16) to quantize W anew for dgrad. gradient_rounding: stochastic or nearest. range_guard: factor 6*16/17 in the
    gradients' block scale. four_six: on the forward's operands (2512.02010). wgrad_rotation: of the wgrad operands, or None.
    wgrad_output: "fp32" for dW without a rounding to BF16 into the gradient of an FP32 parameter. gemms: those quantized.
    """
    x = Operand(NVFP4(four_six=four_six))
    w = Operand(NVFP4(block=weight_block, four_six=four_six))
    dy = Operand(NVFP4(rounding=gradient_rounding, range_guard=range_guard))
    linear = LinearPrecision(
        fprop=GemmPrecision(x, w),
        dgrad=GemmPrecision(dy, w),
        wgrad=GemmPrecision(dy, Operand(NVFP4()), rotation=wgrad_rotation, output=wgrad_output),
    ).only(gemms)
    rules = usual_rules(keep_heads, high_precision_tail)
    policy = Policy("nvfp4", linear, rules).with_phase("bf16", Policy("bf16"))
    return policy.with_phase("bf16_forward", Policy("bf16_forward", linear.only(("dgrad", "wgrad")), rules))
