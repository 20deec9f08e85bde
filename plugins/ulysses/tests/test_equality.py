"""Sequences over ranks give the numbers of sequences on one rank, beyond what the contract asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlrun.testing.tiny import save_tiny

SMALL = {"tokens_per_micro_batch": 12}
LENGTHS = (5, 9, 3, 7, 6, 9, 2)


def both(pools, tools, path, batch, size=2, dtype="float64", head="lm", kind="tokens", **sections):
    """The same update at size 1 on one rank and at `size` on the last pool's ranks, where `sections` hold."""
    expected = tools.update(pools[0], tools.make_config(path, 1, dtype), batch, head, kind)
    return tools.update(pools[-1], tools.make_config(path, size, dtype, **sections), batch, head, kind), expected


@pytest.mark.parametrize("kind, sections", [
    ("sequences", {}), ("groups", {"actor": SMALL}), ("constant", {"model": {"gradient_checkpointing": True}}),
])
def test_update(gpt2, ranks1, ranks2, tools, kind, sections):
    """Cases 55, 60: one update, in float64, of every parameter; lengths that leave padding, and sequences across the cut."""
    got, expected = both((ranks1, ranks2), tools, gpt2, tools.make_batch(*LENGTHS), kind=kind, **sections)
    assert expected.metrics["grad_norm"] > 0.1
    tools.assert_same(got, expected)


def test_two_shards_of_one_rank(gpt2, ranks1, ranks2, tools):
    """Case 55: the plugin at size 1 over two ranks is data parallelism."""
    tools.assert_same(*both((ranks1, ranks2), tools, gpt2, tools.make_batch(5, 9, 3, 7), size=1))


def test_first_update_is_on_policy(gpt2, ranks1, ranks2, tools):
    """Case 27: in float32, log-probabilities of `forward` are those of `update` in any micro-batches: ratios are 1."""
    from rlrun.algorithms.losses import PolicyLoss
    from rlrun.metrics import results
    from rlrun.testing.gloo import drive
    from rlrun.workers.protocol import RoleRequest

    batch, want = tools.make_batch(5, 9, 3, 7), frozenset({"log_probs"})

    def script(workers, plugins, config):
        workers.build("actor", RoleRequest(True, config.model.path, "float32"), 10, want)
        old = torch.cat([workers.forward("actor", batch.select([i]), want, 0.7)["log_probs"] for i in range(len(batch))])
        batch.tokens["log_probs"] = old
        loss = PolicyLoss(0.2, 0.2, "token_mean")
        return old, results(workers.update("actor", batch, loss, batch.denominators(), 0.7))

    columns = []
    for pool, size, tokens in ((ranks1, 1, 4096), (ranks2, 2, 4096), (ranks2, 2, 9)):
        old, metrics = drive(pool, tools.make_config(gpt2, size, "float32", actor={"tokens_per_micro_batch": tokens}), script)
        columns.append(old)
        assert abs(metrics["actor/ppo_kl"]) < 1e-6
        assert metrics["actor/pg_clipfrac"] == 0.0
    assert max((x - columns[0]).abs().max() for x in columns) < 1e-6


KINDS = {
    "llama": {}, "llama-1-kv-head": {"num_key_value_heads": 1}, "qwen2": {}, "qwen3": {},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("name", KINDS)
def test_architectures(ranks1, ranks2, tools, tmp_path, name):
    """Case 55 in float32: grouped queries, one key-value head for two ranks, soft caps, sliding windows."""
    save_tiny(tmp_path, name.split("-")[0], **{**tools.SIZES, **KINDS[name]})
    got, expected = both((ranks1, ranks2), tools, tmp_path, tools.make_batch(*LENGTHS), dtype="float32")
    tools.assert_same(got, expected, tolerance=1e-5, columns=2e-6)


def test_critic(gpt2, ranks1, ranks2, tools):
    """A value head learns equally."""
    got, expected = both((ranks1, ranks2), tools, gpt2, tools.make_batch(5, 9, 3), head="value")
    assert float(expected.gradients["value_head.bias"].abs()) > 0.01
    tools.assert_same(got, expected)


def save_classifier(path: Path, kind: str, **sizes) -> None:
    from transformers import AutoModelForSequenceClassification

    config = save_tiny(path, kind, **sizes).config
    config.num_labels = 1
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)


def test_reward_model(ranks1, ranks2, tools, tmp_path):
    """A sequence classifier scores and learns equally."""
    save_classifier(tmp_path, "llama", **tools.SIZES)
    got, expected = both((ranks1, ranks2), tools, tmp_path, tools.make_batch(5, 9, 3), dtype="float32", head="score")
    assert float(expected.columns["values"].abs().max()) > 1e-3
    tools.assert_same(got, expected, tolerance=1e-5, columns=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_four_ranks(gpt2, ranks1, ranks4, tools, size):
    """Case 55: 4, 2 and 1 data-parallel shards of 1, 2 and 4 ranks each."""
    tools.assert_same(*both((ranks1, ranks4), tools, gpt2, tools.make_batch(*LENGTHS), size=size, actor=SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_copies_of_heads(ranks1, ranks4, tools, tmp_path, kv_heads):
    """Four ranks share one or two key-value heads, whose gradients add up."""
    save_tiny(tmp_path, "qwen2", **tools.SIZES, num_key_value_heads=kv_heads)
    got, expected = both((ranks1, ranks4), tools, tmp_path, tools.make_batch(*LENGTHS), size=4, dtype="float32")
    tools.assert_same(got, expected, tolerance=1e-5, columns=2e-6)
