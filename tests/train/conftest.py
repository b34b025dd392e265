"""Real text, a small one: two modules of the standard library."""

from __future__ import annotations

import argparse
import os
import typing
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may look at a hub


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with two documents, together enough for 20 and more held-out windows of 32 tokens."""
    folder = tmp_path_factory.mktemp("text")
    for module in (argparse, typing):
        (folder / f"{module.__name__}.txt").write_bytes(Path(str(module.__file__)).read_bytes())
    return str(folder)
