"""The learning rate of each update."""

from __future__ import annotations

import math

import pytest

from rlrun.config.schema import OptimConfig
from rlrun.workers.schedule import lr_factor


def test_schedules():
    """Case 52: closed forms, warm-up and floor included."""
    def factors(total=10, **keys):
        return [round(lr_factor(step, OptimConfig(**keys), total), 6) for step in range(10)]

    assert factors(schedule="constant") == [1.0] * 10
    assert factors(schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 7
    assert factors(schedule="linear", min_lr_ratio=0.1) == [round(1 - 0.09 * (i + 1), 6) for i in range(10)]
    cosine = [round(0.5 * (1 + math.cos(math.pi * (i + 1) / 8)), 6) for i in range(8)]
    assert factors(schedule="cosine", warmup_steps=2) == [0.5, 1.0, *cosine]
    assert factors(schedule="wsd", warmup_steps=2, decay_fraction=0.4) == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert lr_factor(99, OptimConfig(schedule="cosine", min_lr_ratio=0.2), 10) == 0.2
    with pytest.raises(ValueError, match="how many updates"):
        lr_factor(0, OptimConfig(schedule="linear"), None)
