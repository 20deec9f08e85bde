"""Neither ranks nor micro-batches nor order change a gradient or a metric."""

from __future__ import annotations

import pytest
import torch


def one_update(tools, config, batch, loss, want=("log_probs", "entropy"), head="lm"):
    worker = tools.make_worker(config, want, head=head)
    mine = tools.my_shard(batch, loss.atom)
    metrics = worker.update(mine, loss, batch.denominators())
    return metrics, tools.full_weights(worker)


def run(pool, tools, config, batch, loss, **kw):
    from rlrun.metrics import merge

    answers = pool.run(lambda: one_update(tools, config, batch, loss, **kw))
    return {name: v.result for name, v in merge(m for m, _ in answers).items()}, [w for _, w in answers]


def assert_same(got, expected, tolerance=1e-9):
    for name, value in expected[0].items():
        assert got[0][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    for weights in got[1]:
        for name, value in expected[1][0].items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", ["tokens", "sequences", "seq_mean", "constant", "groups"])
def test_ranks_and_micro_batches(gpt2, ranks1, ranks2, tools, kind):
    """Cases 63, 82, 98: 1 or 2 ranks, any micro-batch size, any order of rows: equal weights and metrics."""
    loss = tools.TermsLoss(kind, atom="group" if kind == "groups" else "sequence")
    batch = tools.make_batch()
    scale = 0.02 if kind in ("constant", "sequences", "groups") else 1.0
    config = tools.make_config(gpt2, actor__optim__lr=scale)
    expected = run(ranks1, tools, config, batch, loss)
    before = {n: t.double() for n, t in __import__("safetensors.torch").torch.load_file(gpt2 / "model.safetensors").items()}
    moved = max(float((w - before[n]).norm() / before[n].norm()) for n, w in expected[1][0].items() if before[n].norm() > 0)
    assert moved > 0.01
    small = tools.make_config(gpt2, actor__optim__lr=scale, actor__tokens_per_micro_batch=16)
    shuffled = batch.select([3, 2, 5, 4, 1, 0])
    assert_same(run(ranks1, tools, small, shuffled, loss), expected)
    assert_same(run(ranks2, tools, config, batch, loss), expected)
    assert_same(run(ranks2, tools, small, shuffled, loss), expected)
