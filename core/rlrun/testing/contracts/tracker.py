"""What holds for every tracker: the numbers arrive, and a resumed run tells no step twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from rlrun.plugins import Plugins
from rlrun.testing.contracts.base import Contract
from rlrun.trackers.jsonl import Jsonl, cut_back
from rlrun.trackers.protocol import Tracker

TOLERANCE = 1e-6
"""Relative: some trackers keep float32."""
NAME = "critic/score/mean"


class TrackerContract(Contract):
    """The suite for a tracker that `plugins` provides (none: one of core's)."""

    tracker: ClassVar[str]
    read: Callable[[Path], Mapping[str, Sequence[tuple[int, float]]]]
    """A static method: what was kept of a run in its folder, as metric -> (step, value), by step."""

    def make(self, run_dir: Path, resumed_step: int = 0) -> Tracker:
        made: Tracker = Plugins.load(self.plugins).resolve("tracker", self.tracker)(run_dir, 10, resumed_step)
        return made

    def told(self, run_dir: Path, steps: Mapping[int, float], resumed_step: int = 0) -> None:
        """A run's steps from a checkpoint on, with metrics.jsonl, as every run has it."""
        cut_back(run_dir / "metrics.jsonl", resumed_step - 1)
        trackers = Jsonl(run_dir), self.make(run_dir, resumed_step)
        for step, value in steps.items():
            for tracker in trackers:
                tracker.log({NAME: value}, step)
        for tracker in trackers:
            tracker.close()

    def kept(self, run_dir: Path) -> list[tuple[int, float]]:
        return list(type(self).read(run_dir)[NAME])

    def test_numbers_arrive(self, tmp_path: Path) -> None:
        """Every metric of every step, also one that comes in several calls, and one that is not finite breaks nothing."""
        tracker = self.make(tmp_path)
        tracker.log({"val-core/unseen/acc/mean@1": 0.25}, 0)
        for step in (1, 2, 3):
            tracker.log({NAME: step / 3, "timing_s/step": 1.5, "actor/grad_norm": float("inf")}, step)
            tracker.log({"extra/later": -float(step)}, step)
        tracker.close()
        kept = type(self).read(tmp_path)
        assert list(kept["val-core/unseen/acc/mean@1"]) == [(0, 0.25)]
        assert [step for step, _ in kept[NAME]] == [1, 2, 3]
        assert [value for _, value in kept[NAME]] == pytest.approx([1 / 3, 2 / 3, 1.0], rel=TOLERANCE)
        assert list(kept["extra/later"]) == [(1, -1.0), (2, -2.0), (3, -3.0)]

    def test_resume(self, tmp_path: Path) -> None:
        """A run that goes on from step 3 of 5 tells that step once more, and then other ones: each step stands once, as last
        told. Again from step 4."""
        self.told(tmp_path, {step: step / 4 for step in range(1, 6)})
        self.told(tmp_path, {step: float(step) for step in range(3, 7)}, resumed_step=3)
        assert self.kept(tmp_path) == [(1, 0.25), (2, 0.5), (3, 3.0), (4, 4.0), (5, 5.0), (6, 6.0)]
        self.told(tmp_path, {4: 8.0, 5: 9.0}, resumed_step=4)
        assert self.kept(tmp_path) == [(1, 0.25), (2, 0.5), (3, 3.0), (4, 8.0), (5, 9.0)]

    def test_begun_anew(self, tmp_path: Path) -> None:
        """A run that died before its first checkpoint begins at the beginning, and nothing is left of it."""
        self.told(tmp_path, {1: 0.25, 2: 0.5})
        self.told(tmp_path, {1: 7.0})
        assert self.kept(tmp_path) == [(1, 7.0)]
