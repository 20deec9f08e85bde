"""Two test processes share the work by file; tests that start Ray or look at the whole machine stay in one of them."""

from __future__ import annotations

import pytest

ALONE = {"test_failures", "test_processes_slow", "test_resume", "test_stranger", "test_ahead", "test_ulysses", "test_calculator"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in ALONE)  # the longest part first
    for item in items:
        item.add_marker(pytest.mark.xdist_group("alone" if item.path.stem in ALONE else str(item.path)))
