"""What a tracker implements: metrics go somewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """A tracker: a class that `provides` names, made once in the driver.

    It may also have `phase(name: str)`, which is told what the run does now."""

    def __init__(self, run_dir: Path, total_steps: int, resumed_step: int) -> None:
        """`total_steps` is 0 where unknown, `resumed_step` where the run is new; later steps' metrics are void."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step. Steps rise; one step may come in several calls."""

    def close(self) -> None:
        """Write out what is left."""
