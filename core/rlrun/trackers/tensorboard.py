"""TensorBoard event files in RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Every metric as a scalar. A resumed run tells TensorBoard to drop what it has of later steps."""

    def __init__(self, run_dir: Path, total_steps: int, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = resumed_step + 1 if resumed_step else None
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=10)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self.writer.close()
