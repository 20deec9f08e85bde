"""A run's folder: kept to one process, and what of it a new process goes on from."""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rlrun.checkpoint import Checkpoint, Checkpoints, find
from rlrun.config.load import to_yaml
from rlrun.config.schema import Config
from rlrun.errors import ConfigError, RunError
from rlrun.trackers.jsonl import cut_back

FREE = ("trainer.", "checkpoint.", "validation.", "resources.", "run.dir", "plugins", "reward.processes", "reward.timeout_s",
        "actor.tokens_per_micro_batch", "rollout.gap_fraction")
"""Keys that may change: where and how the run works, not what it computes. A stage may also get other `steps` or `epochs`."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep a run folder to one process. The system lets go of it however that process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{directory} is in use by another process", "give this run another run.name") from None
        yield


def resume_point(config: Config, directory: Path, resume: str) -> Checkpoint | None:
    """The run's checkpoint to go on from; None: start anew. Raises ConfigError where the folder does not fit that."""
    checkpoints, saved = Checkpoints(directory / "checkpoints", config.checkpoint.keep), directory / "config.yaml"
    if resume == "never" and saved.exists():
        raise ConfigError(f"--resume never, but {directory} holds a run", "give this run another run.name")
    checkpoint = checkpoints.latest() if resume in ("auto", "never") else find(resume)
    if checkpoint and checkpoint.path.resolve().parent != checkpoints.directory.resolve():
        raise ConfigError(f"--resume {resume} is a checkpoint of another run than {directory}",
                          f"name that run with run.dir and run.name, or begin with its weights: model.path={checkpoint.path}/hf")
    if checkpoint and saved.exists():
        for key, (old, new) in changes(saved, config).items():
            print(f"resuming with {key}: {new!r} (was {old!r})", file=sys.stderr)
    return checkpoint


def cut_back_to(checkpoint: Checkpoint | None, directory: Path) -> None:
    """Leave nothing in a run's folder that is half-written, or later than the checkpoint."""
    checkpoints = Checkpoints(directory / "checkpoints", None)
    checkpoints.remove_partial()
    step = checkpoint.step if checkpoint else -1
    for later in checkpoints.list():
        if later.step > step:
            aside = later.path.with_name(f"superseded-{later.path.name}")
            while aside.exists():
                aside = aside.with_name(f"superseded-{aside.name}")
            later.path.rename(aside)
    cut_back(directory / "metrics.jsonl", step - 1)  # the checkpoint holds its own step's metrics
    for dump in (directory / "rollouts").glob("*.jsonl"):
        if int(dump.stem.rpartition("_")[2]) > step:
            dump.unlink()


def has_more(directory: Path, config: Config) -> bool:
    """Whether a run that had come to its end was given more steps since."""
    return any(key.startswith("stages") for key in changes(directory / "config.yaml", config))


def changes(saved: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value differs from a saved configuration: key -> (old, new). Raises ConfigError for one that must not."""
    old, new = (flat(yaml.safe_load(text), "") for text in (saved.read_text(encoding="utf-8"), to_yaml(config)))
    differing = {k: (old.get(k), new.get(k)) for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)}
    longer = [k for k in differing if k.startswith("stages.") and k.endswith((".steps", ".epochs"))]
    refused = [k for k in differing if not k.startswith(FREE) and k not in longer]
    if refused:
        told = "; ".join(f"{k} was {differing[k][0]!r} and is {differing[k][1]!r}" for k in refused)
        raise ConfigError(f"this run was started with another configuration: {told}", "give the changed run another run.name")
    return differing


def flat(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, item in value.items() for k, v in flat(item, f"{key}.{name}".lstrip(".")).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{key}.{i}").items()}
    return {key: value}
