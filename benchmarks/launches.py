"""What one linear's training step launches on a Hopper GPU, by recipe, read from the code that Inductor generates for it.

    python -m benchmarks.launches

No GPU is needed. 2048 tokens, 1024 by 1024, BF16, no bias. Triton kernels of Inductor, cuBLAS products, and ops of ours. An op
that computes its operand's own amax, after a rotation, is three kernels: zero, amax, quantize.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import fp4
from benchmarks.common import write
from tests.cuda_code import launches
from tests.graphs import rewritten

CASES: tuple[tuple[str, bool], ...] = (
    ("nvfp4", True), ("quartet2", True), ("quartet", True), ("all_the_way", True), ("mxfp4_rht", True), ("tetrajet2", True),
    ("mxfp8", True), ("fp8", False), ("mxfp4_h16", True), ("mxfp4_h16", False),
)  # fmt: skip

SIZES = (2048, 1024, 1024)


def step(recipe: str, exact: bool, tokens: int = 256, k: int = 512, n: int = 512) -> tuple[list[str], list[str]]:
    """The calls of the forward and of the backward graph."""
    policy = fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)
    x = torch.randn(tokens, k, dtype=torch.bfloat16, requires_grad=True)
    got = rewritten(nn.Linear(k, n, bias=False).bfloat16(), x, policy=policy)
    return launches(got.forward[0].graph, exact=exact), launches(got.backward[0].graph, exact=exact)


def kind(call: str) -> str:
    """What a call is, without Inductor's numbers."""
    return call.rstrip("0123456789").rstrip("_") if call.startswith("triton") else call


def main() -> None:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for recipe, exact in CASES:
        forward, backward = step(recipe, exact, *SIZES)
        found[recipe if exact else f"{recipe}, exact=False"] = {"forward": forward, "backward": backward}
    write("launches", {"target": "sm_90", "linear": SIZES, "calls": found})
    print("| recipe | forward | backward | of them Inductor's |\n|---|---|---|---|")
    for name, calls in found.items():
        both = [*calls["forward"], *calls["backward"]]
        own = sum(kind(c).startswith("triton") for c in both)
        print(f"| {name} | {len(calls['forward'])} | {len(calls['backward'])} | {own} |")


if __name__ == "__main__":
    main()
