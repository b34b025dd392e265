"""pytorch#127995: an op that mutates an argument was functionalized into copies. Ours mutate none, alias none, and are checked
by PyTorch's own opcheck, the experts' product included."""

from __future__ import annotations

import pytest
import torch

import fp4
from fp4.compiler.graph import fp4_nodes
from fp4.runtime.grouped import GroupedPrecision
from tests.graphs import MLP, rewritten


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet", "quartet2", "tetrajet2", "mxfp4_rht", "fp8"])
def test_no_op_of_a_graph_mutates_or_aliases(recipe: str) -> None:
    policy = fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)
    got = rewritten(MLP(), torch.randn(32, 64, requires_grad=True), policy=policy)
    targets = {n.target for gm in (*got.forward, *got.backward) for n in fp4_nodes(gm.graph)}
    assert len(targets) >= 3
    for target in targets:
        schema = target._schema  # type: ignore[union-attr]
        assert not schema.is_mutable, target
        assert all(a.alias_info is None for a in (*schema.arguments, *schema.returns)), target


Q, SR = "nvfp4", "nvfp4[rounding=stochastic]"
GROUPED = [
    GroupedPrecision("fprop", Q, "nvfp4[block=16x16]"),
    GroupedPrecision("dgrad", SR, "nvfp4[block=16x16]"),
    GroupedPrecision("wgrad", SR, Q, "hadamard[signs=fixed]"),
]


@pytest.mark.parametrize("precision", GROUPED, ids=lambda p: p.role)
def test_opcheck_of_the_experts_product(precision: GroupedPrecision) -> None:
    x, w, dy = torch.randn(65, 40), torch.randn(4, 48, 40), torch.randn(65, 48)
    first, second = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[precision.role]
    offs, seed = torch.tensor([0, 1, 32, 65], dtype=torch.int32), torch.tensor([3])
    given = (first, second, offs, None, str(precision), seed, 5, torch.float32)
    torch.library.opcheck(torch.ops.fp4.grouped_mm.default, given, test_utils=("test_schema", "test_faketensor"))
