"""Fixtures of the whole-system tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import runs


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return runs.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def left() -> Iterator[runs.Leftovers]:
    """What runs started with `left.env` leave; ends it after a failed test."""
    leftovers = runs.Leftovers()
    yield leftovers
    runs.kill_all(leftovers.processes())


@pytest.fixture(scope="module")
def forks() -> Iterator[runs.Forks]:
    """Starts runs quickly, for tests of launcher local."""
    process = runs.Forks()
    yield process
    process.close()
