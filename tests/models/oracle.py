"""Any eager model with a recipe's arithmetic: whatever multiplies by a weight calls the oracle instead, for the time of a call.

Unlike ``OracleModel``, which replaces modules, this replaces functions (``F.linear``, ``torch.addmm``, the experts' grouped
product), so it holds for code that calls them itself. A linear's index, which its draws depend on, is its place in the order of
calls; the experts' come after those of all linears, one each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.oracle_recipes import RECIPES, _Linear


class Calls:
    """The functions put in place of torch's. linears: how many a forward has, stacks of experts counted once."""

    def __init__(self, linears: int, recipe: str, **flags: Any) -> None:
        self.recipe = RECIPES[recipe](**flags)
        self.linears = linears
        self.index = self.expert = 0
        self.seed = torch.zeros(1, dtype=torch.int64)
        self.plain = torch.nn.functional.linear
        self.inside = False

    def start(self) -> None:
        """At each forward: the graph's one draw, and the first linear."""
        self.index, self.expert = 0, self.linears
        self.seed = torch.randint(0, 2**31 - 1, [1])

    def apply(self, x: Tensor, w: Tensor, b: Tensor | None, index: int) -> Tensor:
        self.inside = True  # a product the recipe leaves alone is F.linear
        try:
            with torch.autocast("cpu", enabled=False):
                return _Linear.apply(x, w, b, self.seed, index, self.recipe)
        finally:
            self.inside = False

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if self.inside:
            return self.plain(x, w, b)
        index, self.index = self.index, self.index + 1
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x, w, b = x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None
        if b is not None and x.dim() > 2 and not x.is_contiguous():  # F.linear adds the bias after the product here
            return self.apply(x, w, None, index) + b
        return self.apply(x, w, b, index)

    def conv1d(self, bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """transformers' Conv1D: a linear whose weight is stored (K, N)."""
        return self.linear(x, w.t(), bias)

    def grouped(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        """x (T, K) sorted by expert, w (E, K, N), offs (E,): each expert a linear of its own."""
        self.index += 1
        first, self.expert = self.expert, self.expert + w.shape[0]
        x, start, results = x.to(w.dtype), 0, []
        for e, end in enumerate(offs.tolist()):
            if end > start:
                results.append(self.apply(x[start:end], w[e].t(), None, first + e))
            start = end
        return torch.cat([*results, x.new_zeros(x.shape[0] - start, w.shape[2])])


@contextmanager
def oracle(calls: Calls) -> Iterator[None]:
    """Inside it the model's products are the oracle's. The draws start anew at each ``calls.start()``."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.nn.functional.linear", calls.linear))
        stack.enter_context(mock.patch("torch.addmm", calls.conv1d))
        stack.enter_context(mock.patch("torch._grouped_mm", lambda x, w, offs=None: calls.grouped(x, w, offs)))
        stack.enter_context(mock.patch("torch.nn.functional.grouped_mm", lambda x, w, offs=None: calls.grouped(x, w, offs)))
        try:
            import transformers.integrations.moe as moe
        except ImportError:
            moe = None  # type: ignore[assignment]
        if moe is not None and hasattr(moe, "_grouped_mm"):
            stack.enter_context(mock.patch.object(moe, "_grouped_mm", calls.grouped))
        yield
