"""TensorBoard event files in RUN/tensorboard."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Every metric as a scalar. What the folder has of the step that a run begins at, which comes again, and later is void."""

    def __init__(self, run_dir: Path, total_steps: int, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_step, flush_secs=10)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self.writer.close()
