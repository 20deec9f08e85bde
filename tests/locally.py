"""Runs in this very process: quick, and their objects can be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs


def load(path: Path, *overrides: str, add: Sequence[str] = ()) -> tuple[Any, Any]:
    """The configuration of a file, and its plugins."""
    from rlrun.config.load import load_config

    return load_config(path, overrides, add)


def train(path: Path, *overrides: str, add: Sequence[str] = (), resume: str = "auto") -> list[dict[str, Any]]:
    """Train as `rl-run` would; the metrics that do not depend on the clock."""
    from rlrun import launch
    from rlrun.testing.ranks import share_gloo_thread

    share_gloo_thread()
    config, plugins = load(path, *overrides, add=add)
    assert launch.run(config, plugins, resume) == 0
    return runs.comparable(runs.metrics(Path(config.run.dir) / config.run.name))
