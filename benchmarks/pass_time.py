"""Time of our own passes: as a share of a compile, and its growth with the number of layers.

    python benchmarks/pass_time.py

The share is measured in whole Inductor compiles (2 and 8 layers, 128 wide); the growth (2, 8, 32 layers) with code
generation left out, since that is not ours and takes minutes at 32 layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph

from benchmarks.common import llama, write
from fp4.compiler import backend
from fp4.compiler.joint_pass import JointPass, LowerPass

HIDDEN, BATCH, LENGTH = 128, 2, 64


class Clock:
    """Seconds spent in the two passes."""

    def __init__(self) -> None:
        self.joint = self.lower = 0.0

    def timed(self, name: str, run: Callable[[Any, Graph], None]) -> Callable[[Any, Graph], None]:
        def call(self_: Any, graph: Graph) -> None:
            start = time.perf_counter()
            run(self_, graph)
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

        return call


def without_codegen(gm: Any, inputs: Any, **_: Any) -> Any:
    """An inner compiler that lowers our ops and stops there."""
    LowerPass()(gm.graph)
    gm.recompile()
    return make_boxed_func(gm.forward)


def measure(layers: int, codegen: bool) -> dict[str, float]:
    torch._dynamo.reset()
    model = llama(layers, HIDDEN, vocabulary=256, positions=LENGTH)
    tokens = torch.randint(0, 256, (BATCH, LENGTH))
    clock = Clock()
    joint, lower, compile_ = JointPass.__call__, LowerPass.__call__, backend.compile_fx
    JointPass.__call__ = clock.timed("joint", joint)  # type: ignore[method-assign]
    LowerPass.__call__ = clock.timed("lower", lower)  # type: ignore[method-assign]
    if not codegen:
        backend.compile_fx = lambda *a, **k: compile_fx(*a, inner_compile=without_codegen, **k)  # type: ignore[assignment]
    try:
        with torch._inductor.config.patch(force_disable_caches=True), torch.autocast("cpu", torch.bfloat16):
            start = time.perf_counter()
            loss = torch.compile(model, backend="fp4", options={"recipe": "nvfp4"})(input_ids=tokens, labels=tokens).loss
            loss.backward()
            total = time.perf_counter() - start
    finally:
        JointPass.__call__, LowerPass.__call__, backend.compile_fx = joint, lower, compile_  # type: ignore[method-assign]
    return {"joint passes": clock.joint, "lowering": clock.lower, "whole compile and first step": total}


def main() -> None:
    growth = {layers: measure(layers, codegen=False) for layers in (2, 2, 8, 32)}  # the first 2 warms up
    whole = {layers: measure(layers, codegen=True) for layers in (2, 8)}
    ours = {n: m["joint passes"] + m["lowering"] for n, m in growth.items()}
    write(
        "pass_time",
        {
            "setting": f"Llama {HIDDEN} wide, {BATCH} x {LENGTH} tokens, recipe nvfp4; seconds",
            "growth, no code generation": growth,
            "ours a layer, from 2 to 8 and from 8 to 32 layers": [(ours[8] - ours[2]) / 6, (ours[32] - ours[8]) / 24],
            "whole compile": whole,
            "share of the compile": {
                n: (m["joint passes"] + m["lowering"]) / m["whole compile and first step"] for n, m in whole.items()
            },
        },
    )


if __name__ == "__main__":
    main()
