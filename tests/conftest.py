"""Which files the workers take first."""

from __future__ import annotations

from collections import Counter

import pytest


@pytest.hookimpl(trylast=True)  # after what is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests first: theirs are the long ones, and a file is one worker's, so that the last must be short."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path])
