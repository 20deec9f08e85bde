"""Updates beyond the contract: tied embeddings, and aggregations of losses."""

from __future__ import annotations

import pytest
import torch


def one_update(tools, config, batch, loss):
    worker = tools.make_worker(config)
    metrics = worker.update(tools.my_shard(batch), loss, batch.denominators(), 0.7)
    return metrics, tools.full_weights(worker)


def run(pool, tools, config, batch, loss):
    from rlrun.metrics import merge, results

    answers = pool.run(one_update, tools, config, batch, loss)
    return results(merge(m for m, _ in answers)), [w for _, w in answers]


def assert_same(got, expected, tolerance=1e-9):
    assert got[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert got[0][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    for weights in got[1]:
        for name, value in expected[1][0].items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_tied_llama(llama, ranks1, ranks2, tools):
    """Tied embeddings get both gradients at any number of ranks. (Norms compute in float32, hence the tolerance.)"""
    batch, loss = tools.make_batch(), tools.TokenLoss()
    expected = run(ranks1, tools, tools.make_config(llama), batch, loss)
    assert "lm_head.weight" not in expected[1][0]
    small = tools.make_config(llama, actor__tokens_per_micro_batch=16)
    assert_same(run(ranks2, tools, small, batch, loss), expected, tolerance=1e-6)


def test_loss_modes(gpt2, ranks1, ranks2, tools):
    """Case 82: token losses [[1,1,1,1],[5]] are 1.8, 3.0 and 4.5, whatever the micro-batches and ranks."""
    from rlrun.algorithms.losses import aggregate
    from rlrun.workers.protocol import Term

    batch = tools.make_batch((6, 3))
    batch.tokens["advantages"] = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 5], dtype=torch.float64)

    class Given:
        def __init__(self, mode):
            self.mode = mode

        def __call__(self, outputs, batch):
            mask = batch.tokens["loss_mask"]
            new = outputs["log_probs"][mask]
            losses = (new - new.detach()).exp() * batch.tokens["advantages"][mask]
            return {"loss": Term(*aggregate(losses, batch, self.mode), 1.0)}

    for mode, expected in (("token_mean", 1.8), ("seq_mean_token_mean", 3.0), ("seq_mean_token_sum", 4.5)):
        first = run(ranks1, tools, tools.make_config(gpt2, actor__optim__lr=0.1), batch, Given(mode))
        assert first[0]["loss"] == pytest.approx(expected, rel=1e-12)
        small = tools.make_config(gpt2, actor__optim__lr=0.1, actor__tokens_per_micro_batch=6)
        assert_same(run(ranks1, tools, small, batch, Given(mode)), first)
        assert_same(run(ranks2, tools, small, batch, Given(mode)), first)
