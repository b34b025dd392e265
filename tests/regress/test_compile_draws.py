"""llm.c#597, fouroversix, Primus-Turbo#365: rounding drew the same numbers in every layer, tile or step, or none at seed 0.

Read off dX of linears whose weight is the identity: dX = decoded(dY) W says how each element of dY was rounded.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp4
from tests.graphs import Captured, capturing, compiled

SR = fp4.NVFP4(rounding="stochastic")
# Only dY of dgrad is rounded, with W = I: dX is the decoded dY.
DGRAD = fp4.Policy("dgrad", fp4.LinearPrecision(dgrad=fp4.GemmPrecision(fp4.Operand(SR), fp4.Operand())))
ROWS, COLUMNS = 256, 64


class Pair(nn.Module):
    """Two identity linears, each on its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(COLUMNS, COLUMNS, bias=False), nn.Linear(COLUMNS, COLUMNS, bias=False)
        for linear in (self.first, self.second):
            nn.init.eye_(linear.weight)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(y)


def rounded(seeds: tuple[int, ...] | None, steps: int = 1) -> list[list[Tensor]]:
    """Of each step, for both linears: was the element rounded up? (ROWS, COLUMNS), +1 or -1.

    dY is 6 in each block's first column, which sets the scale, and 2.5 elsewhere: up is 3, down is 2. seeds: one a step, or
    None to go on drawing.
    """
    torch._dynamo.reset()
    model, found = Pair(), []
    tangent = torch.full((ROWS, COLUMNS), 2.5)
    tangent[:, ::16] = 6
    with capturing(Captured()):
        run = compiled(model, policy=DGRAD, inductor={"fallback_random": True})
        for i in range(steps if seeds is None else len(seeds)):
            inputs = [torch.zeros(ROWS, COLUMNS, requires_grad=True) for _ in "xy"]
            if seeds is not None:
                torch.manual_seed(seeds[i])
            torch.autograd.backward(run(*inputs), [tangent, tangent])
            keep = torch.arange(COLUMNS) % 16 != 0
            found.append([torch.where(x.grad[:, keep] > 2.5, 1.0, -1.0) for x in inputs])  # type: ignore[index]
    return found


def correlation(a: Tensor, b: Tensor) -> float:
    return float((a * b).mean())


# A mean of n products of independent signs is within 4 / sqrt(n) but once in 16,000 times; the seeds are fixed.
N = ROWS * COLUMNS * 15 // 16
LIMIT = 4 / N**0.5


def test_values_are_rounded_to_their_two_neighbours_without_bias() -> None:
    ((first, second),) = rounded((0,))
    for up in (first, second):
        assert set(up.unique().tolist()) == {-1.0, 1.0}
        assert abs(float(up.mean())) < LIMIT


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_two_sites(seed: int) -> None:
    ((first, second),) = rounded((seed,))
    assert abs(correlation(first, second)) < LIMIT


def test_two_tiles_rows_and_columns() -> None:
    ((up, _),) = rounded((0,))
    for shift in (1, 2, 8, 16, 32, 64, 128):
        assert abs(correlation(up[shift:], up[:-shift])) < 4 / up[shift:].numel() ** 0.5
    for shift in (1, 2, 8, 15, 30, 45):
        assert abs(correlation(up[:, shift:], up[:, :-shift])) < 4 / up[:, shift:].numel() ** 0.5


def test_two_steps_and_two_seeds() -> None:
    (a, _), (b, _), (c, _) = rounded(None, steps=3)
    (d, _), (e, _) = rounded((0, 1))
    for first, second in ((a, b), (b, c), (a, c), (d, e)):
        assert abs(correlation(first, second)) < LIMIT


def test_one_seed_is_one_draw() -> None:
    """The tests above would pass on noise from anywhere: it is the seed's."""
    (a, b), (c, d) = rounded((5, 5))
    assert torch.equal(a, c)
    assert torch.equal(b, d)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_forward_and_backward_rotate_with_one_seed(autocast: bool, fallback: bool) -> None:
    """A BF16 forward that prepares wgrad's X: its signs are backward's, though no output of forward depends on the seed.

    With an exact quantizer the rotations cancel; a seed drawn again in backward leaves dW no better than noise.
    """
    torch._dynamo.reset()
    rotation = fp4.Rotation(64, signs="fresh", bf16=False)
    fine = fp4.GemmPrecision(fp4.FP8(), fp4.FP8(), rotation)
    policy = fp4.Policy("fine", fp4.LinearPrecision(dgrad=fine, wgrad=fine))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False)), torch.randn(128, 64)
    found = []
    for run in (compiled(model, policy=policy, inductor={"fallback_random": fallback}), model):
        model.zero_grad()
        with capturing(Captured()), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
        found.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    for ours, exact in zip(*found, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 0.1
