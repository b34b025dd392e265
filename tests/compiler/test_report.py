"""The coverage report: what every linear became, why not, and where it can be read."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp4
from fp4.compiler.joint_pass import StrictError
from tests.graphs import MLP, rewritten

ALL = fp4.recipe("nvfp4", high_precision_tail=0.0)


def x() -> Tensor:
    return torch.randn(2, 16, 64, requires_grad=True)


def test_every_operand_is_named() -> None:
    policy = ALL.with_rules(fp4.keep("b"), fp4.rule("c", wgrad=fp4.BF16))
    found = fp4.report(rewritten(MLP(), x(), policy=policy).model)
    (graph,) = found.graphs
    assert (graph.policy, graph.kind, graph.failures, graph.warnings) == ("nvfp4", "training", [], [])
    a, b, c = graph.linears
    assert (a.name, a.module_type, a.m, a.n, a.k, a.dtype) == ("a", "Linear", 32, 96, 64, "float32")
    assert [(g.role, g.operands, g.rotation, g.reason) for g in a.gemms] == [
        ("fprop", {"X": "nvfp4", "W": "nvfp4[block=16x16]"}, "", ""),
        ("dgrad", {"dY": "nvfp4[rounding=stochastic]", "W": "nvfp4[block=16x16]"}, "", ""),
        ("wgrad", {"dY": "nvfp4[rounding=stochastic]", "X": "nvfp4"}, "hadamard[signs=fixed]", ""),
    ]
    assert {(v, g.reason) for g in b.gemms for v in g.operands.values()} == {("high precision", "keep('b')")}
    assert [g.quantized for g in c.gemms] == [True, True, False]
    assert c.gemms[2].reason == "rule('c': wgrad)"
    assert [found.count(role) for role in ("fprop", "dgrad", "wgrad")] == [2, 2, 1]


def test_json_holds_all_of_it() -> None:
    found = fp4.report(rewritten(MLP(), x(), policy=ALL).model)
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
    assert json.loads(found.to_json())["graphs"][0]["linears"][1]["gemms"][0]["operands"]["X"] == "nvfp4"


def test_the_table_has_a_row_a_product() -> None:
    policy = ALL.with_rules(fp4.keep("b"))
    found = fp4.report(rewritten(MLP(), x(), policy=policy).model)
    assert found.table().row_count == 9
    lines = str(found).splitlines()
    assert "policy nvfp4, training" in lines[0]
    assert sum("keep('b')" in line for line in lines) == 3
    # rich reads [block=16x16] as markup unless it is escaped
    assert sum("nvfp4[block=16x16]" in line for line in lines) == 4
    assert any("(32, 96, 64)" in line for line in lines)


def test_dynamic_sizes_are_question_marks() -> None:
    got = rewritten(MLP(), x(), policy=ALL, dynamic=True)
    assert "(?, 96, 64)" in str(fp4.report(got.model))


def test_products_of_no_linear_are_counted() -> None:
    class Gram(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x.t() @ x) @ x.t())

    found = fp4.report(rewritten(Gram(), torch.randn(64, 64, requires_grad=True), policy=ALL).model)
    (graph,) = found.graphs
    assert sum(graph.unknown.values()) == 6
    assert "2 other products" in str(found)


def test_a_rule_that_matches_nothing_is_a_warning_in_report_and_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fp4.report")
    got = rewritten(MLP(), x(), policy=ALL.with_rules(fp4.keep("haed")))
    (warning,) = fp4.report(got.model).graphs[0].warnings
    assert warning == "keep('haed') matches no linear of this graph; its linears: a, b, c"
    assert [r.message for r in caplog.records if r.name == "fp4.report"] == [warning]


class Broken(MLP):
    """Two linears of three in graphs; one behind a graph break that Dynamo does not compile."""

    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.b(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.eager(self.a(x))
        return self.c(y)


def test_a_linear_no_graph_captured_is_a_failure() -> None:
    found = fp4.report(rewritten(Broken(), x(), policy=ALL).model)
    assert found.uncaptured == ["b"]
    assert found.failures == ["b: no compiled graph captured it"]
    assert [linear.name for graph in found.graphs for linear in graph.linears] == ["a", "c"]
    assert "no compiled graph captured it" in str(found)


def test_the_uncompiled_model_has_the_same_report() -> None:
    model = MLP()
    got = rewritten(model, x(), policy=ALL)
    assert fp4.report(model) == fp4.report(got.model)


def test_two_models_have_two_reports() -> None:
    first, second = MLP(), MLP()
    rewritten(first, x(), policy=ALL)
    rewritten(second, x(), policy=fp4.recipe("bf16"))
    assert fp4.report(first).count("fprop") == 3
    assert fp4.report(second).count("fprop") == 0


def test_no_report_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="compile it and call it once"):
        fp4.report(MLP())
    with pytest.raises(ValueError, match=r"takes the compiled model, a torch.nn.Module; got function"):
        fp4.report(lambda x: x)


def test_strict_raises_what_the_report_lists() -> None:
    """One token and few features: Inductor writes the wgrad as an outer product before the passes run."""
    model, token = nn.Linear(20, 12), torch.randn(1, 20, requires_grad=True)
    (failure,) = rewritten(model, token, policy=ALL).report.failures
    with pytest.raises(Exception, match=r"(?s)strict=True.*Write a rule that keeps these linears") as raised:
        rewritten(model, token, policy=ALL, strict=True)
    errors = [raised.value, raised.value.__cause__, getattr(raised.value, "inner_exception", None)]
    assert any(isinstance(e, StrictError) and failure in str(e) for e in errors)
    # a rule that keeps it is the way out
    rewritten(model, token, policy=ALL.with_rules(fp4.keep("*")), strict=True)


SCRIPT = """
import torch, fp4
from tests.graphs import MLP, rewritten
rewritten(MLP(), torch.randn(2, 16, 64, requires_grad=True), policy=fp4.recipe("nvfp4", high_precision_tail=0.0))
"""


def run(**environment: str) -> str:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    return done.stderr


def test_the_structured_trace_has_the_report(tmp_path: Path) -> None:
    run(TORCH_TRACE=str(tmp_path))
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if '"name": "fp4_report"' in line]
    payload = []
    for line in lines[at + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line)
    report = json.loads("\n".join(payload))
    assert [linear["name"] for linear in report["linears"]] == ["a", "b", "c"]


def test_torch_logs_prints_the_table() -> None:
    assert "policy nvfp4, training" in run(TORCH_LOGS="fp4")
    assert "policy nvfp4" not in run()
