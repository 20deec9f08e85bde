"""What a resumed run may change: not what its metrics so far depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rlrun.config.load import to_yaml
from rlrun.config.schema import Config
from rlrun.errors import ConfigError

FREE = ("trainer.", "checkpoint.", "validation.", "resources.", "run.dir", "plugins", "reward.processes", "reward.timeout_s",
        "actor.tokens_per_micro_batch", "rollout.gap_fraction")
"""Keys that may change: where and how the run works, not what it computes. A stage may also get other `steps` or `epochs`."""


def changes(saved: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value differs from a saved configuration: key -> (old, new). Raises ConfigError for one that must not."""
    old, new = (_flat(yaml.safe_load(text), "") for text in (saved.read_text(encoding="utf-8"), to_yaml(config)))
    differing = {k: (old.get(k), new.get(k)) for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)}
    longer = [k for k in differing if k.startswith("stages.") and k.endswith((".steps", ".epochs"))]
    refused = [k for k in differing if not k.startswith(FREE) and k not in longer]
    if refused:
        told = "; ".join(f"{k} was {differing[k][0]!r} and is {differing[k][1]!r}" for k in refused)
        raise ConfigError(f"this run was started with another configuration: {told}", "give the changed run another run.name")
    return differing


def _flat(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, item in value.items() for k, v in _flat(item, f"{key}.{name}".lstrip(".")).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{key}.{i}").items()}
    return {key: value}
