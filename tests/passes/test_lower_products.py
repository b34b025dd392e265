"""lower_products: which products leave cuBLAS as BF16, on graphs of fake CUDA tensors, since there is none here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from fp4.passes.lower_products import LowerProducts
from fp4.runtime import reference
from tests.graphs import ops

fp4 = torch.ops.fp4
BF16, FP32 = torch.bfloat16, torch.float32


def graph(device: str, a: torch.dtype, b: torch.dtype, out: torch.dtype, alpha: bool, bias: bool) -> Graph:
    made = Graph()
    with FakeTensorMode():
        shapes = (("a", (8, 32), a), ("b", (16, 32), b), ("alpha", (), FP32), ("bias", (16,), BF16))
        values = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in shapes}
        inputs: dict[str, Any] = {}
        for name, value in values.items():
            inputs[name] = made.placeholder(name)
            inputs[name].meta["val"] = value
        args = (inputs["a"], inputs["b"], inputs["alpha"] if alpha else None, inputs["bias"] if bias else None, out)
        node = made.call_function(fp4.mm.default, args)
        node.meta = {"val": torch.empty(8, 16, dtype=out, device=device), "fp4": "layer fprop"}
    made.output(node)
    return made


def test_a_product_without_epilogue() -> None:
    made = graph("cuda", BF16, BF16, BF16, False, False)
    assert LowerProducts().run(made)
    made.lint()
    assert ops(made)["fp4::mm"] == 0
    (node,) = made.find_nodes(op="call_function", target=fp4.product.default)
    assert (node.meta["val"].shape, node.meta["val"].dtype, node.meta["fp4"]) == ((8, 16), BF16, "layer fprop")
    assert not LowerProducts().run(made)


@pytest.mark.parametrize(
    "case",
    [
        ("cpu", BF16, BF16, BF16, False, False),
        ("cuda", BF16, FP32, BF16, False, False),
        ("cuda", BF16, BF16, FP32, False, False),
        ("cuda", BF16, BF16, BF16, True, False),
        ("cuda", BF16, BF16, BF16, False, True),
        ("cuda", FP32, FP32, FP32, False, False),
    ],
    ids=str,
)
def test_what_rounds_after_an_epilogue_is_left(case: Any) -> None:
    made = graph(*case)
    assert not LowerProducts().run(made)
    assert ops(made)["fp4::mm"] == 1


def test_a_tensor_scale_is_cublas_s_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuBLASLt takes it; elsewhere, as above, it is the epilogue of an FP32 result."""
    monkeypatch.setattr("fp4.runtime.cublas.available", lambda device: device.type == "cuda")
    made = graph("cuda", BF16, BF16, BF16, True, False)
    assert LowerProducts().run(made)
    (node,) = made.find_nodes(op="call_function", target=fp4.product.default)
    assert [n.name for n in node.args] == ["a", "b", "alpha"]
    assert not LowerProducts().run(graph("cuda", BF16, BF16, BF16, True, True))


def test_a_named_target_is_enough() -> None:
    made = graph("cpu", BF16, BF16, BF16, False, False)
    assert LowerProducts("sm_90").run(made)
    assert ops(made)["fp4::product"] == 1


def test_the_op_is_the_oracles_gemm() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (5, 7))
    assert torch.equal(fp4.product(a, b), reference.mm(a, b, None, None, BF16))
    alpha = torch.tensor(0.3)
    assert torch.equal(fp4.product(a, b, alpha), reference.mm(a, b, alpha, None, BF16))


def test_the_setting_is_the_users_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the product partial sums are not reduced in BF16; after it, and after an error, the user's choice holds."""
    matmul, seen = torch.backends.cuda.matmul, []
    monkeypatch.setattr(reference, "is_product", lambda *given: True)
    a = torch.ones(2, 4, dtype=BF16)
    before = matmul.allow_bf16_reduced_precision_reduction

    def mm(*given: Any) -> torch.Tensor:
        seen.append(matmul.allow_bf16_reduced_precision_reduction)
        raise RuntimeError("none here")

    monkeypatch.setattr(torch, "mm", mm)
    for allowed in (True, False):
        matmul.allow_bf16_reduced_precision_reduction = allowed
        with pytest.raises(RuntimeError, match="none here"):
            reference.product(a, a)
        assert matmul.allow_bf16_reduced_precision_reduction == allowed
    matmul.allow_bf16_reduced_precision_reduction = before
    assert seen == [False, False]
