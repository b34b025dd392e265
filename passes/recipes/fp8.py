"""DeepSeek-V3's FP8 recipe (2412.19437, section 3.3): the FP8 baseline.

    GEMM    first operand              second operand                        rotation
    fprop   X  E4M3 1x128              W E4M3 128x128                        none
    dgrad   dY E4M3 1x128              W E4M3 128x128 (fprop's codes, W^T)   none
    wgrad   dY E4M3 1x128, tokens      X E4M3 1x128, tokens                  none

FP32 block scales amax/448. Products accumulate in FP32 here; the paper's promotion of partial sums is a remedy for the
H800's 14 bits.

Paper and code: the paper quantizes wgrad's X again from its saved FP8 copy; here it is quantized from the original. The power
of two scales and E5M6 inputs of single layers are not here.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Policy, usual_rules
from fp4.runtime.spec import FP8


def fp8(
    *,
    gradient_format: str = "e4m3",
    weight_block: tuple[int, int] = (128, 128),
    gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad"),
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """DeepSeek-V3 FP8 (2412.19437): E4M3, 1x128 activations and gradients, 128x128 weights, FP32 scales.

    gradient_format: of dY, e4m3 or e5m2. weight_block: (128, 128) or (1, 128). gemms: those quantized. keep_heads,
    high_precision_tail: keep head and routers, and the last share of the linears, in BF16.
    """
    x, w, dy = FP8(), FP8(block=weight_block), FP8(format=gradient_format)
    linear = LinearPrecision(GemmPrecision(x, w), GemmPrecision(dy, w), GemmPrecision(dy, x)).only(gemms)
    rules = usual_rules(keep_heads, high_precision_tail)
    return Policy("fp8", linear, rules)
