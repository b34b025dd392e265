"""MLIR of rewritten graphs: imported, verified, printed, parsed, verified again; what is wrong is refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import fp4
from fp4.compiler import pipeline
from fp4.compiler.explain import mlir
from fp4.compiler.explain.capture import Captured
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.pipeline import Context
from fp4.passes import JOINT_PASSES
from tests.graphs import MLP, llama, tokens


@pytest.fixture(scope="module")
def block() -> Captured:
    """A Llama block's captured joint graph."""
    explained = fp4.explain(llama(num_hidden_layers=1), tokens(), labels=tokens(), recipe="bf16", autocast=torch.bfloat16)
    return explained.graphs[0]


@pytest.fixture(scope="module")
def text() -> str:
    return fp4.explain(MLP(), torch.empty(32, 64), recipe="nvfp4").mlir()


@pytest.mark.parametrize("recipe", fp4.recipes())
def test_the_llama_block_of_every_recipe_round_trips(block: Captured, recipe: str) -> None:
    graph = copy.deepcopy(block.stages["captured"])
    policy = fp4.recipe(recipe)
    if recipe not in ("bf16", "fp4_forward"):  # all seven linears of the block
        policy = fp4.Policy(policy.name, policy.precision)
    pipeline.run(JOINT_PASSES, graph, Context(policy, block.context.inputs))
    printed = mlir.mlir(graph, "rewritten")
    parsed = mlir.parse(printed)
    assert str(parsed) == printed
    ops = [f"fp4.{n.target._opname}" for n in fp4_nodes(graph)]  # type: ignore[union-attr]
    assert re.findall(r'"(fp4\.\w+)"', printed) == ops
    assert "torch.fp4." not in printed
    assert ("fp4.quantize" in ops) == (recipe != "bf16")


def test_every_stage_of_joint_and_partitioned_graphs() -> None:
    e = fp4.explain(MLP(), torch.empty(32, 64), recipe="quartet2")
    for stage in [s for s in e.stages if s != "lowered"]:  # lowered: two modules, see below
        mlir.parse(e.mlir(stage))


def test_lowered_for_a_gpu_has_the_kernels() -> None:
    x = torch.empty(32, 64)
    text = fp4.explain(MLP(), x, recipe="nvfp4", target="sm_90").mlir("lowered")
    assert '"fp4.fake_quantize"' in text
    assert '"fp4.rotate_quantize"' in text
    assert '"fp4.rotate"' not in text
    for part in text.split("\nmodule"):
        mlir.parse(part if part.startswith("module") else f"module{part}")
    assert '"fp4.fake_quantize"' not in fp4.explain(MLP(), x, recipe="nvfp4").mlir("lowered")


BROKEN = {
    "a missing attribute": (r'quantizer = "nvfp4", site', "site", 'attribute "quantizer" is expected but not provided'),
    "an attribute of another kind": (
        r'quantizer = "nvfp4"',
        "quantizer = 16 : i64",
        "expected base attribute 'builtin.string'",
    ),
    "an unknown quantizer": (r'quantizer = "nvfp4"', 'quantizer = "nvfp5"', "'nvfp5' is not a specification"),
    "an unknown field": (r"nvfp4\[block=16x16\]", "nvfp4[blocks=16x16]", "nvfp4 has no field 'blocks'"),
    "an unknown rotation": (r"hadamard\[signs=fixed\]", "hadamard[signs=some]", "signs='some'"),
    "an unknown role": (r'role = "wgrad"', 'role = "sgrad"', "sgrad"),
    "an unknown dtype": (r'dtype = "bf16"', 'dtype = "bf8"', "bf8"),
    "an unknown op": (r'"fp4.amax"', '"fp4.amin"', "unregistered operation 'fp4.amin'"),
    "a missing operand": (
        r'"fp4.amax"\(%arg1\) : \(!torch.vtensor<\[32,64\],f32>\)',
        '"fp4.amax"() : ()',
        "op expects exactly 1 operands|op expects 1 operands",
    ),
    "an operand of another type": (
        r'(%\d+) = "fp4.amax"\(%arg1\) : \(!torch.vtensor<\[32,64\],f32>\)',
        r'%i = torch.constant.int 1\n    \1 = "fp4.amax"(%i) : (!torch.int)',
        "vtensor",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_refused(text: str, what: str) -> None:
    pattern, replacement, message = BROKEN[what]
    broken = re.sub(pattern, replacement, text, count=1)
    assert broken != text
    with pytest.raises(fp4.ExplainError, match=message):
        mlir.parse(broken)


def test_the_dialect_declares_every_op() -> None:
    declared = set(re.findall(r"irdl.operation @(\w+)", mlir.dialect()))
    assert {"quantize", "dequantize", "rotate", "unrotate", "amax", "mm", "seed", "fake_quantize"} <= declared
    assert declared == {name for name, _ in mlir.schemas()}
