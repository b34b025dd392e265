"""Error of Y, dX and dW of one linear under every recipe, against the exact products; and what forward saves.

    python -m benchmarks.recipe_errors

The rewritten graph of a linear without bias, 512 tokens, 1024 -> 512, run op by op: one draw. Three inputs: Gaussian; 8
channels 20 times as large; 16 tokens 20 times as large. dY is Gaussian. Errors are relative: norm of the difference over
norm of the exact product. Prints the table of docs/recipes.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp4
from benchmarks.common import write
from fp4.compiler.policy import Policy
from tests.graphs import interpreted, nbytes, rewritten, saved

M, K, N = 512, 1024, 512


def policy(name: str) -> Policy:
    """The recipe with nothing kept in BF16."""
    return fp4.recipe(name) if name == "bf16" else fp4.recipe(name, keep_heads=False, high_precision_tail=0.0)


def inputs() -> dict[str, Tensor]:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0))
    channels, tokens = x.clone(), x.clone()
    channels[:, :: K // 8] *= 20
    tokens[:: M // 16] *= 20
    return {"Gaussian": x, "outlier channels": channels, "outlier tokens": tokens}


def exact(model: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    dy = torch.randn(M, N, generator=torch.Generator().manual_seed(4))  # the tangent of tests.graphs.step
    w = model.weight.detach().double()
    return {"Y": x.double() @ w.t(), "dX": dy.double() @ w, "dW": dy.double().t() @ x.double()}


def errors(name: str, model: nn.Linear, x: Tensor) -> dict[str, dict[str, float]]:
    """Relative error and cosine of Y, dX, dW."""
    got = interpreted(model, x.requires_grad_(), policy(name))
    found = {}
    for key, value in exact(model, x.detach()).items():
        ours = got[{"Y": "output", "dX": "input", "dW": "weight"}[key]].double()
        cosine = float((ours * value).sum() / (ours.norm() * value.norm()))
        found[key] = {"relative error": float((ours - value).norm() / value.norm()), "cosine": cosine}
    return found


def saved_bytes(name: str, model: nn.Linear, x: Tensor) -> int:
    """Bytes that forward keeps for backward beyond the parameters, under autocast."""
    got = rewritten(model, x.requires_grad_(), policy=policy(name), autocast=True)
    return sum(nbytes(n) for n in saved(got) if n.op != "placeholder" or n.meta["val"].shape == x.shape)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(K, N, bias=False)
    table: dict[str, Any] = {}
    for name in fp4.recipes():
        rows = {kind: errors(name, model, x) for kind, x in inputs().items()}
        table[name] = {"errors": rows, "saved bytes": saved_bytes(name, model, inputs()["Gaussian"])}
    write("recipe_errors", {"setting": f"M={M}, K={K}, N={N}, FP32 parameters, one draw", "recipes": table})
    kinds = list(inputs())
    print(f"| recipe | {' | '.join(f'{kind}: Y / dX / dW' for kind in kinds)} | cosine of dW, Gaussian |")
    print(f"|---|{'---|' * (len(kinds) + 1)}")
    for name, entry in table.items():
        cells = [" / ".join(f"{v['relative error']:.3f}" for v in entry["errors"][kind].values()) for kind in kinds]
        print(f"| `{name}` | {' | '.join(cells)} | {entry['errors']['Gaussian']['dW']['cosine']:.4f} |")


if __name__ == "__main__":
    main()
