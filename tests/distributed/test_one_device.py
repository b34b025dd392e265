"""Two ranks against one device on the same global batch, the rewritten graphs run op by op.

What no rank adds up with another's is equal in bits, draws included. Where partial sums of two ranks are added, each is rounded
once and so is their sum, in FP32, and the additions come in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4
from tests.distributed.ranks import on_ranks
from tests.graphs import Captured, capturing, compiled, unequal

ROUNDING = 2.0**-24  # of FP32, relative
RECIPES = ("nvfp4", "quartet2")


class Pair(nn.Module):
    """Two linears, for tensor parallelism by columns and then by rows: (..., 256) -> (..., 256)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
        with torch.no_grad():  # the largest elements lie in one rank's part: its own amax is not the tensor's
            self.a.weight[3, 5], self.b.weight[5, 3] = 0.5, -0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def data() -> tuple[Tensor, Tensor]:
    """Input and the output's gradient, (4, 64, 256); the largest elements are in the first rank's half of the batch."""
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 4, 64, 256, generator=generator)
    x[0, 3, 5], dy[1, 2, 3] = 12.0, -9.0
    return x, dy


def run(model: nn.Module, x: Tensor, dy: Tensor, recipe: str, **options: Any) -> dict[str, Tensor]:
    torch._dynamo.reset()
    policy = fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)
    leaf = x.clone().requires_grad_()
    with capturing(Captured()):
        torch.manual_seed(5)
        y = compiled(model, policy=policy, inductor={"fallback_random": True}, **options)(leaf)
        y.backward(dy)
    found = {"output": y.detach(), "input": leaf.grad, **{n: p.grad for n, p in model.named_parameters()}}
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}


def tensor_parallel(recipe: str) -> dict[str, Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = parallelize_module(Pair(), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    return run(model, *data(), recipe)


def data_parallel(recipe: str) -> dict[str, Tensor]:
    x, dy = (t.chunk(2)[dist.get_rank()] for t in data())
    found = run(Pair(), x, dy, recipe, batch_group="world")
    for name, t in found.items():
        if name in ("output", "input"):
            parts = [torch.empty_like(t) for _ in range(2)]
            dist.all_gather(parts, t.contiguous())
            found[name] = torch.cat(parts)
        else:
            dist.all_reduce(t)
    return found


def alone(recipe: str) -> dict[str, Tensor]:
    """The whole batch on every rank, each by itself; a seed of the rank's own and one of all, and signs drawn with it."""
    from fp4.runtime import reference

    found = run(Pair(), *data(), recipe)
    torch.manual_seed(7)
    shared = torch.ops.fp4.seed(torch.device("cpu"), [dist.group.WORLD.group_name])  # type: ignore[union-attr]
    signs = reference.signs(fp4.Rotation(128, signs="fresh"), shared, 9, shared.device)
    return {**found, "seed": torch.ops.fp4.seed(torch.device("cpu")), "shared seed": shared, "signs": signs}


def every(recipes: tuple[str, ...]) -> dict[str, dict[str, dict[str, Tensor]]]:
    return {f.__name__: {r: f(r) for r in recipes} for f in (tensor_parallel, data_parallel, alone)}


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    """What one device has, and each of two ranks."""
    return {r: run(Pair(), *data(), r) for r in RECIPES}, on_ranks(every, RECIPES)


def bound(first: Tensor, second: Tensor, terms: int) -> Tensor:
    """Largest difference of two sums of `terms` products, of first's and second's rows, in another order and cut in two.

    Quantizing moves an element by less than a third of the largest one.
    """
    a, b = (t.abs() + t.abs().amax() / 3 for t in (first, second))
    return (3 + terms) * ROUNDING * (a @ b.t())


def within(name: str) -> Tensor:
    model, (x, dy) = Pair(), data()
    x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    a, b = model.a.weight.detach(), model.b.weight.detach()
    hidden = (x @ a.t()).relu()
    gradient = (dy @ b) * (hidden > 0)
    sums: dict[str, Callable[[], Tensor]] = {
        "output": lambda: bound(hidden, b, 512).unflatten(0, (4, 64)),
        "input": lambda: bound(gradient, a.t(), 512).unflatten(0, (4, 64)),
        "a.weight": lambda: bound(gradient.t(), x.t(), 256),
        "b.weight": lambda: bound(dy.t(), hidden.t(), 256),
    }
    return sums[name]()


CUT = {"tensor_parallel": ("output", "input"), "data_parallel": ("a.weight", "b.weight")}


def check(case: str, one: dict[str, Tensor], first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert unequal(first, second) == []
    assert set(unequal(one, first)) <= set(CUT[case])
    for name in CUT[case]:
        assert ((one[name] - first[name]).abs() <= within(name)).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CUT)
def test_two_ranks_are_one_device(both: Any, case: str, recipe: str) -> None:
    check(case, both[0][recipe], *(r[case][recipe] for r in both[1]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_draw_alone_and_together(both: Any, recipe: str) -> None:
    """After one torch.manual_seed everywhere a rank's draws are its own, and those of rank 0 are one device's."""
    first, second = (dict(r["alone"][recipe]) for r in both[1])
    names = ("seed", "shared seed", "signs")
    (own, shared, signs), (own_, shared_, signs_) = ([run.pop(n) for n in names] for run in (first, second))
    assert unequal(first, second) == ["input", "a.weight", "b.weight"]  # forward rounds to nearest
    assert unequal(first, both[0][recipe]) == []
    assert own != own_
    assert shared == shared_
    assert torch.equal(signs, signs_)


@pytest.mark.slow
def test_other_recipes() -> None:
    """Power-of-two scales with a drawn rotation; outer scales, and draws in forward."""
    recipes = ("mxfp4_rht", "tetrajet2", "quartet", "all_the_way")
    ranks = on_ranks(every, recipes)
    for recipe in recipes:
        one = run(Pair(), *data(), recipe)
        for case in CUT:
            check(case, one, *(r[case][recipe] for r in ranks))
