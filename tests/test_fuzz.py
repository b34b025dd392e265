"""A few random stacks of linears (``tests/fuzz.py``); ``python -m benchmarks.fuzz`` runs hundreds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests import fuzz

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(fuzz.cases())
def test_a_random_stack_equals_the_oracle(case: fuzz.Case) -> None:
    fuzz.check(case)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(fuzz.cases())
def test_forty_more(case: fuzz.Case) -> None:
    """Other cases at every run; what fails is shrunk and printed."""
    fuzz.check(case)


def test_the_check_fails_for_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else equality would say nothing of the draws."""
    from tests.models.oracle import Calls

    case = fuzz.Case(0, "float32", False, (33,), 40, ((48, True, "next"),), "contiguous", "gaussian", (), False, 5, True, 3)
    while fuzz.RECIPES[case.recipe][0] != "nvfp4":
        case = fuzz.dataclasses.replace(case, recipe=case.recipe + 1)
    fuzz.check(case)
    start = Calls.start

    def later(self: Calls) -> None:
        start(self)
        self.seed = self.seed + 1

    monkeypatch.setattr(Calls, "start", later)
    with pytest.raises(AssertionError, match="differs"):
        fuzz.check(case)
