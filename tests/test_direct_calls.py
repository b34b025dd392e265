"""Inductor's code calls our ops past the dispatcher, read from the code that it generates for an H200."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp4
from fp4.compiler import direct_calls
from fp4.kernels import direct
from fp4.passes import regions
from fp4.runtime import reference
from tests.cuda_code import wrapper_code
from tests.graphs import rewritten


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the stand-ins are for PyTorch 2.13")
def test_each_call_has_a_function_of_its_own_and_its_results_are_not_checked() -> None:
    policy = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    got = rewritten(nn.Linear(128, 64, bias=False).bfloat16(), x, policy=policy)
    for graph in (got.forward[0].graph, got.backward[0].graph):
        code = wrapper_code(graph)
        made, called = re.findall(r"^(fp4_\w+) = fp4_direct", code, re.MULTILINE), re.findall(r" buf\d+ = (fp4_\w+)\(", code)
        assert sorted(made) == sorted(called)
        assert len(set(made)) >= 5
        assert direct_calls.IMPORT in code
        assert "torch.ops.fp4." not in code.partition("def call(")[2]
        assert not re.search(r"assert_\w+\(buf", code)


def node(device: torch.device, symbolic: bool) -> Any:
    """A node with a matrix as its argument and its result."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = env.create_unbacked_symint() if symbolic else 8
        x = torch.empty(rows, 16, device=device)
    argument = types.SimpleNamespace(meta={"val": x})
    return types.SimpleNamespace(meta={"val": (x.new_empty(4),)}, all_input_nodes=[argument])


@pytest.mark.parametrize(
    ("device", "symbolic", "is_direct"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_only_known_sizes_on_a_gpu_are_called_so(device: str, symbolic: bool, is_direct: bool) -> None:
    assert direct_calls._direct(node(torch.device(device), symbolic)) is is_direct


def test_every_op_of_a_lowered_graph_is_called_so() -> None:
    """All that stays an op, but what waits for other ranks and the experts, whose sizes are data."""
    assert set(direct.BINDERS) == set(regions.OPAQUE) - {"reduce_amax", regions.EXPERTS}


def test_a_product_off_the_gpu_is_the_op() -> None:
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    product = direct.direct("product")
    for alpha in (None, torch.tensor(0.5)):
        assert torch.equal(product(a, b, alpha), reference.product(a, b, alpha))
