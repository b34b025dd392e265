"""Error of Y, dX and dW of one linear under every recipe, against the exact products; and what forward saves.

    python -m benchmarks.recipe_errors

The rewritten graph of a linear without bias, 512 tokens, 1024 -> 768, run op by op: one draw. Four inputs: Gaussian; 8
channels 20 times as large; 16 tokens 20 times as large; 8 channels again, each the first of a group of 32, which a Hadamard
rotation without signs turns into a constant. dY is Gaussian. Errors are relative: norm of the difference over
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

M, K, N = 512, 1024, 768


def policy(name: str) -> Policy:
    """The recipe with nothing kept in BF16."""
    return fp4.recipe(name) if name == "bf16" else fp4.recipe(name, keep_heads=False, high_precision_tail=0.0)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator)
    channels, tokens, first = x.clone(), x.clone(), x.clone()
    channels[:, torch.randperm(K, generator=generator)[:8]] *= 20
    tokens[torch.randperm(M, generator=generator)[:16]] *= 20
    first[:, :: K // 8] *= 20
    return {"Gaussian": x, "outlier channels": channels, "outlier tokens": tokens, "outlier channels, first of 32": first}


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
    """Bytes that forward keeps for backward of X, a BF16 tensor, under autocast."""
    got = rewritten(model, x.bfloat16().requires_grad_(), policy=policy(name), autocast=True)
    kept = [n for n in saved(got) if sorted(n.meta["val"].shape) != sorted(model.weight.shape)]  # less autocast's copy of W
    return sum(map(nbytes, kept))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(K, N, bias=False)
    table: dict[str, Any] = {}
    for name in fp4.recipes():
        rows = {kind: errors(name, model, x) for kind, x in inputs().items()}
        table[name] = {"errors": rows, "saved bytes": saved_bytes(name, model, inputs()["Gaussian"])}
    write("recipe_errors", {"setting": f"M={M}, K={K}, N={N}, FP32 parameters, one draw", "recipes": table})
    kinds = list(inputs())
    print(f"| recipe | {' | '.join(f'{kind}: Y / dX / dW' for kind in kinds)} | cosine of dW, Gaussian | saved, of BF16's |")
    print(f"|---|{'---|' * (len(kinds) + 2)}")
    for name, entry in table.items():
        cells = [" / ".join(f"{v['relative error']:.3f}" for v in entry["errors"][kind].values()) for kind in kinds]
        cosine, kept = entry["errors"]["Gaussian"]["dW"]["cosine"], entry["saved bytes"] / (2 * M * K)
        print(f"| `{name}` | {' | '.join(cells)} | {cosine:.4f} | {kept:.3f} |")


if __name__ == "__main__":
    main()
