"""MLflow: a run in experiment $MLFLOW_EXPERIMENT_NAME, or "rlrun", at $MLFLOW_TRACKING_URI, or in RUN/mlflow.db."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from rlrun.trackers.jsonl import replay

FOLDER = "rlrun.folder"


class Mlflow:
    """Every metric by step. Steps cannot be taken back there, so a resumed run is a new one that is told metrics.jsonl first; the
    one before it is deleted."""

    def __init__(self, run_dir: Path, total_steps: int, resumed_step: int) -> None:
        from mlflow import MlflowClient

        folder = str(run_dir.resolve())
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db"))
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rlrun")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        for old in self.client.search_runs([experiment], f"tags.`{FOLDER}` = '{folder}'"):
            self.client.delete_run(old.info.run_id)
        self.run = self.client.create_run(experiment, tags={FOLDER: folder}, run_name=run_dir.resolve().name).info.run_id
        replay(run_dir / "metrics.jsonl", self.log)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        names = {name: re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")) for name in metrics}  # which MLflow takes
        self.client.log_batch(self.run, [Metric(names[name], float(value), now, step) for name, value in metrics.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)
