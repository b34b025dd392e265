"""pytorch#164981: with a pass outside the cache key, one policy's compiled graph was returned for another.

Two policies in one cache folder, each with its backward, in fresh processes; then the first again, which is a hit. And our own
sources are in the key: an edited kernel is another graph.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp4
from fp4.compiler import backend, joint_pass
from fp4.compiler.joint_pass import JointPass, LowerPass, source_digest
from fp4.compiler.lowering import LoweringOptions
from fp4.compiler.sites import Input

SCRIPT = """
import hashlib, json, sys
import torch
from torch._dynamo.utils import counters
import fp4
from tests.graphs import step
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
x = torch.randn(32, 64)
policy = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0)
if sys.argv[1] == "kept":
    policy = policy.with_rules(fp4.keep("1"))
if sys.argv[1] == "nearest":
    policy = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0, gradient_rounding="nearest")
options = {"policy": policy, "inductor": {"fallback_by_default": True, "selective_decompose": True}}  # little to compile
if sys.argv[1] == "lowered":
    options["target"] = "sm_100a"
compiled = torch.compile(model, backend="fp4", options=options)
found = step(model, compiled, x)
report = fp4.report(model)
print(json.dumps({
    "bits": {n: hashlib.sha256(v.numpy().tobytes()).hexdigest() for n, v in found.items()},
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "cached": [g.from_cache for g in report.graphs],
    "quantized": [report.count(r) for r in ("fprop", "dgrad", "wgrad")],
}))
"""


def run(policy: str, cache: Path) -> dict[str, object]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, policy], env=env, capture_output=True, text=True, cwd=cache)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_each_policy_has_its_own_result_and_the_first_again_is_a_hit(tmp_path: Path) -> None:
    first, kept, nearest = (run(policy, tmp_path) for policy in ("all", "kept", "nearest"))
    assert [r["misses"] for r in (first, kept, nearest)] == [1, 1, 1]
    assert [r["hits"] for r in (first, kept, nearest)] == [0, 0, 0]
    bits = [json.dumps(r["bits"]) for r in (first, kept, nearest)]
    assert len(set(bits)) == 3
    # Rounding of gradients changes no output; keeping a linear does.
    assert first["bits"]["output"] == nearest["bits"]["output"] != kept["bits"]["output"]  # type: ignore[index]
    again = run("all", tmp_path)
    assert (again["hits"], again["misses"]) == (1, 0)
    assert again["bits"] == first["bits"]
    # The report is kept beside the graph.
    assert (first["cached"], again["cached"]) == ([False], [True])
    assert first["quantized"] == again["quantized"] == [2, 2, 2]


INPUTS = {0: Input("a.weight", True), 1: Input("x", False)}


def passes(**changed: object) -> JointPass:
    fields = {"policy": fp4.recipe("nvfp4"), "inputs": INPUTS, "save_weights": False, "strict": False, "done": print}
    return JointPass(**{**fields, **changed})  # type: ignore[arg-type]


def test_every_field_that_changes_the_graph_is_in_the_key() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"policy": fp4.recipe("nvfp4").with_rules(fp4.keep("a"))},
        {"inputs": {0: Input("b.weight", True), 1: Input("x", False)}},  # a rule is on names
        {"inputs": {0: Input("a.weight", False), 1: Input("x", False)}},
        {"save_weights": True},
        {"strict": True},
        {"lowering": LoweringOptions(exact=False)},
    ]
    ids = [passes(**c).uuid() for c in changes]
    assert None not in ids
    assert len(set(ids)) == len(ids)
    assert passes().uuid() == passes(done=repr).uuid()


def test_what_has_no_digest_is_not_cached() -> None:
    table = {"a": 1}
    unhashable = fp4.policy(lambda site: fp4.recipe("nvfp4").precision if site.name in table else fp4.LinearPrecision())
    assert passes(policy=unhashable).uuid() is None
    assert passes(observer=lambda stage, graph: None).uuid() is None


@pytest.mark.parametrize("folder", ["compiler", "passes", "passes/recipes", "runtime", "kernels"])
def test_an_edit_in_the_process_changes_the_digest(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compiler", "passes/recipes", "runtime", "kernels"):
        (tmp_path / name).mkdir(parents=True)
    source = tmp_path / folder / "kernel.py"
    source.write_text("FACTOR = 1\n")
    monkeypatch.setattr(joint_pass, "_ROOT", tmp_path)
    before, joint, lower = source_digest(), passes().uuid(), LowerPass().uuid()
    assert source_digest() == before
    source.write_text("FACTOR = 2  # edited\n")
    after = source_digest()
    assert after != before
    assert passes().uuid() != joint
    assert LowerPass().uuid() != lower
    source.write_text("FACTOR = 1\n")
    os.utime(source, ns=(0, 0))
    assert source_digest() == before


def test_a_new_file_and_a_renamed_one_change_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setattr(joint_pass, "_ROOT", tmp_path)
    seen = [source_digest()]
    (tmp_path / "runtime" / "a.py").write_text("A = 1\n")
    seen.append(source_digest())
    (tmp_path / "runtime" / "a.py").rename(tmp_path / "runtime" / "b.py")
    seen.append(source_digest())
    assert len(set(seen)) == 3


def test_the_real_sources_are_hashed() -> None:
    source_digest()
    hashed = {path.parent.name for path in joint_pass._hashed if path.is_relative_to(joint_pass._ROOT)}
    assert {"compiler", "passes", "recipes", "runtime"} <= hashed


@pytest.mark.slow
def test_a_cached_graph_finds_the_ops_of_the_kernels(tmp_path: Path) -> None:
    """On a GPU a graph calls ops that a pass registered; a hit in another process runs no pass."""
    first, again = run("lowered", tmp_path), run("lowered", tmp_path)
    assert (first["misses"], again["hits"], again["misses"]) == (1, 1, 0)
    assert again["bits"] == first["bits"]


def test_the_backend_registers_the_ops_of_the_kernels() -> None:
    script = """
import torch
from fp4.compiler import backend
backend.compile_with = lambda read, joint, gm, inputs: gm
assert not hasattr(torch.ops.fp4, "rotate_quantize")
torch.compile(torch.nn.Linear(16, 16), backend=backend.fp4)(torch.randn(2, 16))
assert hasattr(torch.ops.fp4, "rotate_quantize") and hasattr(torch.ops.fp4, "scaled_mm")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_report_is_found_again_after_the_model_s_file_moved() -> None:
    """Inductor's key has no files and lines: a cached graph is a hit when its source moved, and its report must be too."""
    joint = JointPass(fp4.recipe("nvfp4"), {}, False, False, print)
    keys = set()
    for line in (1, 2):
        gm = torch.fx.symbolic_trace(torch.nn.Linear(16, 16))
        for node in gm.graph.nodes:
            node.meta["stack_trace"] = f'File "/somewhere/model.py", line {line}, in forward\n    return x'
        keys.add(backend._report_key(joint, gm, [torch.zeros(2, 16)]))
    assert len(keys) == 1
    assert keys != {None}
