"""Weights & Biases, also offline (WANDB_MODE=offline): a run in project $WANDB_PROJECT, or "rlrun"; files in RUN/wandb."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlrun.trackers.jsonl import replay


class Wandb:
    """Every metric by step. Steps cannot be taken back there, so a resumed run is a new one that is told metrics.jsonl first; in
    place of an offline one, and beside one that was sent, in the same group."""

    def __init__(self, run_dir: Path, total_steps: int, resumed_step: int) -> None:
        import wandb

        for offline in (run_dir / "wandb").glob("offline-run-*"):
            shutil.rmtree(offline)
        name, project = run_dir.resolve().name, os.environ.get("WANDB_PROJECT", "rlrun")
        self.run = wandb.init(project=project, name=name, group=name, dir=str(run_dir), settings=wandb.Settings(console="off"))
        replay(run_dir / "metrics.jsonl", self.log)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()
