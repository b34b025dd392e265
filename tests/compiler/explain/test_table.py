"""The table: rows, totals, collapsed layers, its four forms."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import fp4
from fp4.compiler.explain import mlir
from fp4.compiler.explain.repeats import runs
from fp4.compiler.explain.table import HEADINGS, amount
from tests.graphs import MLP

SHARED = "X nvfp4 2.25 KiB, with k_proj, v_proj"


def test_a_row_a_gemm_with_operands_rotation_saved_and_reason(explained: fp4.Explanation) -> None:
    rows = explained.table().rows()
    assert len(rows) == 3 * (4 * 7 + 1)
    q = rows[:3]
    assert q[0] == ("model.layers.0.self_attn.q_proj", "(64, 64, 64)", "fprop", "X nvfp4", "W nvfp4[block=16x16]", "", "", "")
    assert q[1][6] == "W the parameter"
    assert q[2][3:7] == ("dY nvfp4[rounding=stochastic]", "X nvfp4", "hadamard[signs=fixed]", SHARED)
    head = rows[-3:]
    assert head[0][0] == "lm_head"
    assert {row[7] for row in head} == {"keep heads and routers"}


def test_saved_bytes_of_one_operand() -> None:
    """(64 + 32) rows of 64: half a byte a code, a byte for 16, four of the tensor scale."""
    e = fp4.explain(MLP(), torch.empty(32, 64), recipe="nvfp4")
    (row,) = [r for r in e.table().graphs[0][1] if r.report.name == "b"]
    parts = {t.part: t.bytes for t in row.saved["wgrad"] if t.part != "seed"}
    assert parts == {"codes": 96 * 16, "scales": 96 * 2, "tensor scale": 4}


def test_totals(explained: fp4.Explanation) -> None:
    totals = explained.table().totals()
    assert totals.linears == 29
    kept = 1 + 5  # the head, and the last ceil(0.15 * 28)
    assert totals.gemms == dict.fromkeys(("fprop", "dgrad", "wgrad"), (29 - kept, 29))
    flops = [2 * 64 * n * k for n, k in ((64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128))]
    assert totals.flops == 3 * (4 * sum(flops) + 2 * 64 * 256 * 64)
    assert totals.flops_quantized == 3 * (3 * sum(flops) + sum(flops[:2]))


def test_layers_that_are_alike_are_one_row(explained: fp4.Explanation) -> None:
    names = [row[0] for row in explained.table(collapse=True).rows() if row[0]]
    assert names[0] == "model.layers.0-2.self_attn.q_proj"
    assert len(names) == 7 + 7 + 1
    assert next(n for n in names if "layers.3" in n) == "model.layers.3.self_attn.q_proj"


def test_runs_of_layers() -> None:
    rows = {f"h.{i}.{x}": (x, i in (2, 3)) for i in range(6) for x in "ab"} | {"head": 1}
    found = runs(rows)
    assert [found[f"h.{i}.a"].label for i in range(6)] == ["h.0-1"] * 2 + ["h.2-3"] * 2 + ["h.4-5"] * 2
    assert "head" not in found


def test_plain_markdown_json_rich(explained: fp4.Explanation, capsys: pytest.CaptureFixture[str]) -> None:
    table = explained.table(collapse=True)
    plain = str(table)
    assert "\x1b" not in plain
    assert re.search(r"^model\.layers\.0-2\.mlp\.down_proj +\(64, 64, 128\) +fprop +X nvfp4 ", plain, re.MULTILINE)
    table.show()
    assert capsys.readouterr().out == plain + "\n"  # no terminal here
    markdown = table.to_markdown().splitlines()
    assert markdown[2].count("|") == len(HEADINGS) + 1
    assert all(line.count("|") == len(HEADINGS) + 1 for line in markdown[2:50] if line.startswith("|"))
    data = json.loads(table.to_json())
    assert data["totals"]["linears"] == 29
    assert data["graphs"][0]["linears"][0]["shared"]["wgrad"] == [f"model.layers.0.self_attn.{x}_proj" for x in "kv"]
    console = Console(file=io.StringIO(), force_terminal=True, width=220)
    console.print(table)
    assert "\x1b[32m" in console.file.getvalue()  # type: ignore[attr-defined]


def test_amounts() -> None:
    assert [amount(n) for n in (0, 512, 1536, 1023 * 1024, 20 << 20, 3 << 30, 5 << 40)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "1023 KiB",
        "20 MiB",
        "3 GiB",
        "5,120 GiB",
    ]


def test_experts_of_a_grouped_product() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(4, 64, 96, dtype=torch.bfloat16))

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.up, offs)

    x = torch.empty(32, 64, dtype=torch.bfloat16, requires_grad=True)
    e = fp4.explain(Experts(), x, torch.empty(4, dtype=torch.int32), policy=fp4.Policy("all", fp4.recipe("nvfp4").precision))
    (row,) = e.table().graphs[0][1]
    assert row.report.name == "up"
    assert [t.kind for t in row.saved["dgrad"] if t.readers == [("up", "dgrad", "W")]] == ["parameter"]
    assert [t.kind for t in row.saved["wgrad"] if t.readers == [("up", "wgrad", "X")]] == ["input"]
    assert "up" in e.graph()[0]
    mlir.parse(e.mlir())
