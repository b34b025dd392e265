"""One Llama of four layers, explained once for all tests here."""

from __future__ import annotations

import pytest
import torch

import fp4
from tests.graphs import llama, tokens


@pytest.fixture(scope="session")
def explained() -> fp4.Explanation:
    return fp4.explain(llama(num_hidden_layers=4), tokens(), labels=tokens(), recipe="nvfp4", autocast=torch.bfloat16)
