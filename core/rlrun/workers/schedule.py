"""Learning rate over the updates of a stage."""

import math

from rlrun.config.schema import OptimConfig


def lr_factor(step: int, optim: OptimConfig, total: int | None) -> float:
    """Share of `optim.lr` that update `step` (from 0) of `total` uses.

    Warm-up is linear, (step + 1) / warmup_steps; the last update is at the floor `min_lr_ratio`. Raises ValueError
    where the schedule needs a total and there is none."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    if total is None:
        raise ValueError(f"schedule {optim.schedule!r} needs to know how many updates there will be: "
                         "give the stage steps instead of epochs, or use schedule constant")
    start = optim.warmup_steps
    if optim.schedule == "wsd":
        start = max(start, total - round(optim.decay_fraction * total))
    done = min(max((step + 1 - start) / max(total - start, 1), 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left
