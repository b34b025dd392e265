"""The examples of training engines start and learn; their graphs are captured and rewritten, no code is generated."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.graphs import Captured, capturing

ROOT = Path(__file__).parents[2]
ENGINES = sorted((ROOT / "examples" / "engines").glob("*.py"))
NEEDS = {"hf_trainer": ("transformers", "accelerate"), "accelerate_loop": ("accelerate",), "lightning_module": ("lightning",)}
# Runs a script within `capturing`, in each process that torchrun starts.
CAPTURED = """
import runpy, sys
from tests.graphs import Captured, capturing
with capturing(Captured()):
    runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", ENGINES, ids=[p.stem for p in ENGINES])
def test_engine(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[path.stem]:
        pytest.importorskip(package)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch._dynamo.reset()
    got = Captured()
    with capturing(got):
        runpy.run_path(str(path), run_name="__main__")
    assert any(g.quantized for report in got.reports for linear in report.linears for g in linear.gemms)
    assert not any(report.failures or report.warnings for report in got.reports)
    printed = capsys.readouterr().out
    assert printed.count("loss") >= 4
    assert "dgrad" in printed


@pytest.mark.slow
def test_fsdp2_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "captured.py"
    script.write_text(CAPTURED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "examples/fsdp2.py"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "dgrad" in done.stdout


def test_trainer_refuses_the_backend_by_name() -> None:
    """Accelerate's list of backends is closed: when this fails, the example can name the backend in TrainingArguments."""
    dataclasses = pytest.importorskip("accelerate.utils.dataclasses")
    with pytest.raises(ValueError, match="FP4"):
        dataclasses.TorchDynamoPlugin(backend="fp4")
