"""Runs tests/kernels/interpreted, which need an environment variable set before Triton is imported, in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_equal_the_oracle_under_the_interpreter(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "FP4_CACHE_DIR": str(tmp_path)}
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", folder]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
