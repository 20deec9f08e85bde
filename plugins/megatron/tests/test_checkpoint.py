"""Saving and resuming, in the same layout bit for bit and in others; folders that transformers reads."""

from __future__ import annotations

import pytest
import torch

CONTENTS = ["model", "optimizer", "extra"]


def train(tools, config, batch, steps, load=None, save=None, contents=CONTENTS):
    """A few updates, and what is there after them: learning rates, weights, random numbers."""
    def script(workers, plugins, config):
        from rlrun.metrics import results
        from rlrun.workers.protocol import RoleRequest

        want = frozenset({"log_probs", "entropy"})
        workers.build("actor", RoleRequest(True, config.model.path, config.model.dtype), 20, want)
        if load is not None:
            workers.load("actor", load, CONTENTS)
        history = [results(workers.update("actor", batch, tools.TokenLoss(), batch.denominators(), 0.7)) for _ in range(steps)]
        if save is not None:
            workers.save("actor", save, contents)
        return history, workers.call("weights", "actor")[0], torch.rand(3)

    return script


def adam(tools, path, **megatron):
    config = tools.make_config(path, micro=16, **megatron)
    config.actor.optim.name, config.actor.optim.lr, config.actor.optim.schedule = "adamw", 0.01, "linear"
    return config


@pytest.mark.parametrize("layout", [
    {}, {"use_distributed_optimizer": False}, {"tensor_model_parallel_size": 2}], ids=str)
def test_resume(models, ranks2, tools, tmp_path, layout):
    """Two updates, saved, and two more are, bit for bit, four updates in a row; also saved before the first."""
    from rlrun.testing.gloo import drive

    batch = tools.make_batch(5, 9, 3, 7, 6, 9)
    config = adam(tools, models["qwen2 tied"], **layout)
    whole, weights, drawn = drive(ranks2, config, train(tools, config, batch, 4))
    for before in (2, 0):
        first, _, _ = drive(ranks2, config, train(tools, config, batch, before, save=tmp_path / str(before)))
        second, resumed, redrawn = drive(ranks2, config, train(tools, config, batch, 4 - before, load=tmp_path / str(before)))
        assert first + second == whole
        assert all(torch.equal(resumed[name], x) for name, x in weights.items())
        assert torch.equal(drawn, redrawn)
    assert whole[0]["lr"] != whole[3]["lr"]
