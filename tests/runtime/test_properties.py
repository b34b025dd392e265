"""Any allowed quantizer on any operand equals the numpy oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4.runtime.spec import Quantizer
from tests.runtime import cases
from tests.runtime.strategies import operands, quantizers

SLOW_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large]
arguments = given(operands(), quantizers(), st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))


@arguments
@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=SLOW_DRAW)
def test_quantize_equals_the_oracle(x: torch.Tensor, q: Quantizer, seed: int, site: int) -> None:
    cases.check_against_oracle(x, q, seed=seed, site=site)


@pytest.mark.slow
@arguments
@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=SLOW_DRAW)
def test_quantize_equals_the_oracle_at_length(x: torch.Tensor, q: Quantizer, seed: int, site: int) -> None:
    cases.check_against_oracle(x, q, seed=seed, site=site)
