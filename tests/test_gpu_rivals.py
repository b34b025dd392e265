"""benchmarks.gpu_rivals without a GPU: the compiled rival's arithmetic, missing peers, rows, table and plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_rivals, kernel_plot
from fp4.runtime import reference
from fp4.runtime.spec import NVFP4
from tests.runtime.cases import gaussian


@pytest.mark.parametrize("along", [1, 0])
def test_the_compiled_rival_does_the_oracles_work(along: int) -> None:
    x = gaussian(64, 128).bfloat16()
    operand = x if along else x.t()
    q = NVFP4()
    exact = reference.dequantize(*reference.quantize(operand, q), q, operand.shape[1], torch.bfloat16)
    differ = (gpu_rivals.fake(x, None, along) != exact).float().mean()
    assert differ < 0.01  # quotients are rounded elsewhere


def test_the_compiled_rival_rounds_without_bias() -> None:
    x = gaussian(16, 64).bfloat16()
    torch.manual_seed(0)
    mean = torch.stack([gpu_rivals.fake(x, x.abs().amax() * 1.1, stochastic=True).float() for _ in range(2000)]).mean(0)
    assert (mean - x.float()).abs().mean() < 0.02
    assert (gpu_rivals.fake(x, None).float() - x.float()).abs().mean() > 0.05


def rows() -> list[dict[str, Any]]:
    """Rows of fakes whose seconds are what they return: ours 1, one rival that only packs 3, one that fails."""

    def fails(case: Any, x: Any) -> Any:
        raise RuntimeError("no such instruction")

    own: dict[str, Any] = {"ours": lambda case, x: lambda: torch.tensor(1.0)}
    others: dict[str, Any] = {"slow": lambda case, x: (lambda: 3.0) if case.output == "packed" else None, "broken": fails}
    return list(gpu_rivals.measure(torch.zeros(16, 32), own, others, 1e3, lambda run: (float(run()), "a fake")))


def test_rows() -> None:
    found = {row["case"]: row for row in rows()}
    row = found["nearest packed, along dim 0, amax given"]
    assert row["bar"] == 2.0
    assert row["ours"]["of copy"] == pytest.approx(16 * 32 * (2 + 1 / 2 + 1 / 16) / 1e3, abs=1e-3)
    assert row["rivals"]["slow"]["ours is faster"] == 3.0
    assert row["rivals"]["broken"] == {"failed": "RuntimeError: no such instruction"}
    assert "slow" not in found["nearest decoded, amax given"]["rivals"]
    assert found["mxfp4 packed, amax none"]["bar"] == 1.0
    assert found["stochastic packed, amax computed"]["bar"] == 2.0


def test_a_line_stars_what_misses_the_bar() -> None:
    row = next(row for row in rows() if row["case"] == "stochastic packed, amax given")
    assert "slow 0.44 (3.0x)" in gpu_rivals.line(row)
    row["rivals"]["slow"]["ours is faster"] = 1.9
    assert "(1.9x *)" in gpu_rivals.line(row)
    assert "broken failed" in gpu_rivals.line(row)


def test_missing_peers_are_named(tmp_path: Path) -> None:
    found, states = gpu_rivals.rivals(tmp_path)
    assert list(found) == ["torch.compile"]
    assert set(states) == {"quartet2", "fouroversix", "torchao"}
    assert all(state.startswith("FileNotFoundError: no folder") for state in states.values())


def test_a_rivals_share_is_nought_where_it_has_no_such_operation() -> None:
    labels, shares = kernel_plot.rival_bars({kernel_plot.SIZE: {"rows": json.loads(json.dumps(rows()))}})
    assert list(shares) == ["ours", "slow"]  # what only failed has no bar
    assert shares["slow"][labels.index("nearest decoded")] == 0.0
    assert shares["slow"][labels.index("nearest packed")] > 0.0
    assert not any("amax" in label for label in labels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_rivals", str(tmp_path / "r.json")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "no CUDA GPU" in run.stderr
