"""NVIDIA's MXFP8 recipe (Recipes for Pre-training LLMs with MXFP8, 2506.08027): the MX baseline and null control.

    GEMM    first operand              second operand             rotation
    fprop   X  E4M3 1x32, rceil        W E4M3 1x32, rceil         none
    dgrad   dY E4M3 1x32, rceil        W E4M3 1x32, rceil         none
    wgrad   dY E4M3 1x32, tokens       X E4M3 1x32, tokens        none

Every operand is quantized from the original, along the dimension its GEMM contracts. The scale is 2^ceil(log2(amax/448)),
which never clips; `scale_rule="floor"` is OCP's, which does, and which the paper finds worse.
"""

from __future__ import annotations

from fp4.compiler.policy import GemmPrecision, LinearPrecision, Policy, usual_rules
from fp4.runtime.spec import MXFP8


def mxfp8(
    *,
    scale_rule: str = "rceil",
    gradient_format: str = "e4m3",
    gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad"),
    keep_heads: bool = True,
    high_precision_tail: float = 0.0,
) -> Policy:
    """NVIDIA MXFP8 (2506.08027): E4M3 in blocks of 32 everywhere, scales rounded up.

    scale_rule: rceil or floor. gradient_format: of dY, e4m3 or e5m2. gemms: those quantized. keep_heads, high_precision_tail:
    keep head and routers, and the last share of the linears, in BF16.
    """
    q, dy = MXFP8(scale_rule=scale_rule), MXFP8(scale_rule=scale_rule, format=gradient_format)
    linear = LinearPrecision(GemmPrecision(q, q), GemmPrecision(dy, q), GemmPrecision(dy, q)).only(gemms)
    rules = usual_rules(keep_heads, high_precision_tail)
    return Policy("mxfp8", linear, rules)
