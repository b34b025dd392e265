"""The backend's options, its entry point, and what it hands to Inductor."""

from __future__ import annotations

import ast
import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import fp4
from fp4.compiler.backend import Chain, OptionError, Options, quantizes
from fp4.passes.recipes import DEFAULT
from tests.graphs import MLP, Captured, capturing, compiled, ops, rewritten, trios

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"recipes": "nvfp4"}, "backend fp4 has no option 'recipes'; its options: recipe, policy, phase, strict"),
    "two unknown": ({"b": 1, "a": 2}, "no option 'a', 'b'"),
    "Inductor's": (
        {"max_autotune": True},
        r"'max_autotune' is a setting of Inductor: write options=\{'inductor': \{'max_autotune': ...\}\}",
    ),
    "Inductor's, nested": ({"triton.cudagraphs": True}, r"options=\{'inductor': \{'triton.cudagraphs': ...\}\}"),
    "policy by name": ({"policy": "nvfp4"}, r"policy='nvfp4' is a str; write an fp4.Policy: fp4.recipe\('nvfp4'\).with_rules"),
    "policy function": ({"policy": lambda site: None}, "a function decorated with @fp4.policy"),
    "both": ({"policy": fp4.recipe("nvfp4"), "recipe": "nvfp4"}, "give recipe= or policy=, not both"),
    "strict": ({"strict": "yes"}, "strict='yes'; write True or False"),
    "save_weights": ({"save_weights": 1}, "save_weights=1; write True or False"),
    "inductor": ({"inductor": "max_autotune"}, "inductor='max_autotune'; write a dict of Inductor settings"),
    "inductor key": (
        {"inductor": {"max_autotun": True}},
        r"Inductor has no setting 'max_autotun'; torch._inductor.list_options\(\)",
    ),
    "mode": ({"mode": "fastest"}, "mode='fastest'; write one of default, .*max-autotune"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        Options.read(options, None)


def test_the_page_has_every_option_in_order_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    assert list(rows) == list(Options.__dataclass_fields__)
    shown = {name: ast.literal_eval(text.strip("`")) for name, text in rows.items() if text.startswith("`")}
    defaults = Options()
    assert shown.pop("recipe") == DEFAULT
    assert shown == {name: value for name in rows if (value := getattr(defaults, name)) is not None}


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(fp4.PolicyError, match=r"there is no recipe 'nvfp5'; the recipes: .*nvfp4"):
        Options.read({"recipe": "nvfp5"}, None).resolved()


def test_the_error_reaches_the_user() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(64, 64), backend="fp4", options={"recipes": "nvfp4"})
    with pytest.raises(Exception, match="backend fp4 has no option 'recipes'"):
        compiled(torch.randn(32, 64))


def test_the_default_is_the_default_recipe() -> None:
    assert Options.read(None, None).resolved() == fp4.recipe("nvfp4")
    assert Options.read({"recipe": "bf16"}, None).resolved() == fp4.recipe("bf16")
    policy = fp4.recipe("nvfp4").with_rules(fp4.keep("a"))
    assert Options.read({"policy": policy}, None).resolved() is policy


def test_mode_from_the_keyword_and_from_the_options() -> None:
    assert Options.read(None, "max-autotune").mode == "max-autotune"
    assert Options.read({"mode": "reduce-overhead", "recipe": "nvfp4"}, None).mode == "reduce-overhead"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "lite"])
def test_every_mode_is_rewritten(mode: str) -> None:
    """Mode "lite" switches Inductor's joint passes off; ours run all the same."""
    policy = fp4.recipe("nvfp4", high_precision_tail=0.0)
    got = rewritten(MLP(), torch.randn(32, 64, requires_grad=True), policy=policy, mode=mode)
    assert ops(got.joint.final)["fp4::mm"] == 9


def test_quantizes() -> None:
    assert quantizes(fp4.recipe("nvfp4"))
    assert not quantizes(fp4.recipe("bf16"))
    gemm = fp4.GemmPrecision(fp4.NVFP4(), None)
    assert quantizes(fp4.recipe("bf16").with_rules(fp4.rule("a", fprop=gemm)))
    assert quantizes(fp4.policy(lambda site: fp4.LinearPrecision()))


def test_the_user_s_own_pass_runs_first() -> None:
    order: list[str] = []

    class Mine(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            order.append("fp4" if any("fp4" in str(n.target) for n in graph.nodes) else "plain")

        def uuid(self) -> str:
            return "mine"

    settings = {"joint_custom_pre_pass": Mine()}
    got = rewritten(nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True), recipe="nvfp4", inductor=settings)
    assert order == ["plain"]
    assert got.joints


def test_a_chain_without_a_uuid_bypasses_the_cache() -> None:
    class Named(CustomGraphPass):
        def __init__(self, name: str | None) -> None:
            self.name = name

        def __call__(self, graph: Graph) -> None: ...

        def uuid(self) -> str | None:
            return self.name

    ours, hook = Named("ours"), "joint_custom_pre_pass"
    assert Chain.of({hook: None}, hook, ours) is ours
    assert Chain.of({hook: Named("a")}, hook, ours).uuid() != Chain.of({hook: Named("b")}, hook, ours).uuid()
    assert Chain.of({hook: lambda graph: None}, hook, ours).uuid() is None
    assert Chain.of({hook: [Named("a"), Named(None)]}, hook, ours).uuid() is None


def test_the_observer_sees_every_stage() -> None:
    seen: list[str] = []
    rewritten(nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True), observer=lambda stage, graph: seen.append(stage))
    assert seen == [
        "captured",
        "canonicalize",
        "tag_gemms",
        "assign_precision",
        "insert_rotation",
        "insert_quantize",
        "requantize",
        "share_quantized",
    ]


def test_names_are_the_model_s() -> None:
    model = nn.ModuleDict({"Up": nn.Linear(64, 64), "down.proj".replace(".", "_"): nn.Linear(64, 64)})
    got = rewritten(lambda x: model["down_proj"](model["Up"](x)), torch.randn(32, 64, requires_grad=True))
    assert [name for name, _ in trios(got)] == ["Up", "down_proj"]


def test_a_model_that_was_copied_or_is_a_method() -> None:
    model = copy.deepcopy(MLP())
    got = rewritten(model.forward, torch.randn(32, 64, requires_grad=True))
    assert [name for name, _ in trios(got)] == ["a", "b", "c"]


def test_equal_policies_compile_once_different_ones_twice() -> None:
    """Dynamo guards on the options: a policy is a value."""
    model, x = MLP(), torch.randn(32, 64)
    torch._dynamo.reset()
    got = Captured()
    with capturing(got):
        for tail in (0.0, 0.0, 0.5, 0.0):
            compiled(model, policy=fp4.recipe("nvfp4", high_precision_tail=tail))(x)
    assert len(got.joints) == 2


def test_the_entry_point_is_found_without_an_import() -> None:
    """A fresh process that never imports fp4."""
    code = (
        "import sys, torch\n"
        "import torch._dynamo as d\n"
        "assert not any(m == 'fp4' or m.startswith('fp4.') for m in sys.modules)\n"
        "assert 'fp4' in d.list_backends(exclude_tags=())\n"
        "print(torch._dynamo.backends.registry.lookup_backend('fp4').__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fp4.compiler.backend"
