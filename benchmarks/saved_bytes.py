"""What forward saves for backward, by tensor: a 2-layer Llama, 512 wide, 4 x 256 tokens, BF16 autocast; bf16 and nvfp4.

    python -m benchmarks.saved_bytes

Read off the partitioned forward graph; nothing is computed. The inputs of the quantized linears are compared by themselves:
their codes and scales against the BF16 activations that wgrad would read.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import fp4
from benchmarks.common import llama, write
from fp4.compiler.sites import Role
from tests.graphs import Captured, nbytes, rewritten, saved


def captured(recipe: str) -> Captured:
    tokens = torch.randint(0, 4096, (4, 256))
    return rewritten(
        llama(2, 512), tokens, policy=fp4.recipe(recipe), autocast=True, loss=lambda y: y.logits.float().square().mean()
    )


def table(got: Captured) -> list[dict[str, Any]]:
    """Saved tensors that are no graph inputs, equal ones together, largest first."""
    rows: Counter[tuple[str, str]] = Counter()
    size: dict[tuple[str, str], int] = {}
    for node in saved(got):
        if node.op != "placeholder":
            value = node.meta["val"]
            key = (str(tuple(value.shape)), str(value.dtype).removeprefix("torch."))
            rows[key] += 1
            size[key] = nbytes(node)
    order = sorted(rows, key=lambda k: -rows[k] * size[k])
    return [{"shape": k[0], "dtype": k[1], "tensors": rows[k], "bytes": rows[k] * size[k]} for k in order]


def main() -> None:
    plain, quantized = captured("bf16"), captured("nvfp4")
    linears = [x for x, d in zip(quantized.linears, quantized.joint.context.decisions, strict=True) if d.precision.quantized]
    activations = {x.x for x in linears if Role.WGRAD in x.gemms}
    codes = [n for n in saved(quantized) if n.op != "placeholder" and n.meta["val"].dtype == torch.uint8]
    ours, theirs = sum(map(nbytes, codes)) + 4 * len(activations), sum(map(nbytes, activations))
    tables = {"bf16": table(plain), "nvfp4": table(quantized)}
    write(
        "saved_bytes",
        {
            "setting": "2-layer Llama, 512 wide, 4 x 256 tokens, BF16 autocast",
            "inputs of the quantized linears": {
                "distinct": len(activations),
                "bytes in bf16": theirs,
                "bytes in nvfp4": ours,
                "ratio": ours / theirs,
            },
            "all saved bytes": {name: sum(r["bytes"] for r in rows) for name, rows in tables.items()},
            "by tensor": tables,
        },
    )


if __name__ == "__main__":
    main()
