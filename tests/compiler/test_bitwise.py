"""Compiled by Inductor, the nvfp4 recipe equals an eager model built from the oracle, bit for bit: output and gradients.

The eager model (``tests/oracle_recipes.py``) has a plain ``autograd.Function`` a linear and is written from the recipe's table.
Inductor sums a norm or a bias gradient in another order than ATen does, so a whole Llama is compared in two steps: the
rewritten graph run by ATen's kernels (mode "lite", where our ops run as the oracle) against the eager model; and the graph
with our ops compiled against the same graph with them opaque, the rest compiled by Inductor in both.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.joint_pass import LowerPass
from fp4.train.loop import deterministic
from tests.oracle_recipes import OracleModel

INDUCTOR: dict[str, Any] = {"fallback_random": True}
ATEN: dict[str, Any] = {**INDUCTOR, "fallback_by_default": True, "selective_decompose": True}
ALL = fp4.recipe("nvfp4", high_precision_tail=0.0)


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a = nn.Linear(64, 96, bias=bias)
        self.b = nn.Linear(96, 64, bias=bias)
        self.lm_head = nn.Linear(64, 128, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.b(self.a(x).relu()))


def gradients(model: nn.Module, run: Any, autocast: bool, *inputs: Tensor) -> dict[str, Tensor]:
    """Output, and gradients of the inputs and parameters, of one step from random state 7."""
    torch.manual_seed(7)
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = run(*leaves)
    y = y if isinstance(y, Tensor) else y.logits
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    found = {"output": y.detach()}
    found |= {f"input {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def compare(
    model: nn.Module, policy: fp4.Policy, kept: set[str], settings: dict[str, Any], autocast: bool, *inputs: Tensor
) -> None:
    torch._dynamo.reset()
    copied = copy.deepcopy(model)
    options: Any = {"policy": policy, "inductor": settings}
    compiled = torch.compile(model, backend="fp4", options=options)
    with deterministic():
        ours = gradients(model, compiled, autocast, *inputs)
    order = [linear.name for linear in fp4.report(compiled).graphs[0].linears]
    oracle = OracleModel(copied, order, kept)
    with deterministic():
        theirs = gradients(oracle.model, oracle, autocast, *inputs)
    assert unequal(ours, theirs) == []


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_mlp(autocast: bool) -> None:
    torch.manual_seed(0)
    compare(MLP(bias=False), ALL, {"lm_head"}, INDUCTOR, autocast, torch.randn(2, 32, 64))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_mlp_with_bias(autocast: bool) -> None:
    torch.manual_seed(0)
    compare(MLP(bias=True), ALL, {"lm_head"}, ATEN, autocast, torch.randn(2, 32, 64))


@pytest.mark.parametrize("kept", [set(), {"1"}], ids=["all quantized", "the last kept"])
def test_linears_in_a_row(kept: set[str]) -> None:
    """A gradient is the next linear's operand as the product leaves it, and in mode "lite" products alone have tags."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    policy = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0).with_rules(*(fp4.keep(name) for name in kept))
    compare(model, policy, kept, ATEN, False, torch.randn(32, 64))


def test_another_seed_is_another_gradient() -> None:
    """Stochastic rounding really draws: else equality above would hold of a deterministic model too."""
    torch.manual_seed(0)
    model = MLP(bias=False)
    oracle = OracleModel(model, ["a", "b", "lm_head"], {"lm_head"})
    x = torch.randn(2, 32, 64)
    found = []
    for seed in (7, 7, 8):
        model.zero_grad()
        torch.manual_seed(seed)
        oracle(x).square().sum().backward()
        gradient = model.get_parameter("a.weight").grad
        assert gradient is not None
        found.append(gradient.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def llama(kv_heads: int = 1, attention: str = "sdpa", layers: int = 2) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


# Grouped-query attention by SDPA is not bitwise the same captured and not (PyTorch decomposes it: "aot_eager" differs from no
# compiler in the same gradients), so it is compared with the attention written out.
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(("kv_heads", "attention"), [(2, "sdpa"), (1, "eager")])
def test_llama(kv_heads: int, attention: str, autocast: bool) -> None:
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(2))
    # 14 linears in the blocks; the last ceil(0.15 * 14) = 3 and the head stay in BF16.
    kept = {"lm_head"} | {f"model.layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")}
    compare(llama(kv_heads, attention), fp4.recipe("nvfp4"), kept, ATEN, autocast, tokens)


@pytest.mark.slow
def test_llama_compiled_equals_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our ops lowered and compiled, or called as the oracle: every output and gradient has the same bits."""
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(2))
    model, found = llama(layers=1), []
    for lowered in (True, False):
        if not lowered:
            monkeypatch.setattr(LowerPass, "__call__", lambda self, graph: None)
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        with torch._inductor.config.patch(force_disable_caches=True):
            options: Any = {"inductor": INDUCTOR}
            compiled = torch.compile(copied, backend="fp4", options=options)
            with deterministic():
                found.append(gradients(copied, compiled, False, tokens))
    assert unequal(*found) == []


PROCESS = """
import hashlib, json, torch
import fp4
from tests.compiler.test_bitwise import ALL, gradients
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU())
compiled = torch.compile(model, backend="fp4", options={"policy": ALL})
found = gradients(model, compiled, True, torch.randn(2, 32, 64))
assert [fp4.report(compiled).count(role) for role in ("fprop", "dgrad", "wgrad")] == [1, 1, 1]
print(json.dumps({n: hashlib.sha256(t.float().numpy().tobytes()).hexdigest() for n, t in found.items()}))
"""


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path) -> None:
    """Same seed, other processes, their own compile caches: the same bits, draws included."""
    root = Path(__file__).parents[2]
    found = []
    for i in range(2):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(i)), "PYTHONPATH": str(root)}
        done = subprocess.run([sys.executable, "-P", "-c", PROCESS], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
