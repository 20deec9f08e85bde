"""Every way of the policy-gradient algorithms, on one pair of models: ranks, micro-batches and order change nothing."""

from __future__ import annotations

import torch
from test_numbers import assert_same, gpt2, moved, other, recorded, write  # noqa: F401

from rlrun.testing.gloo import drive
from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401

CLIPS = {"gspo": {"clip_low": 0.01, "clip_high": 0.02}, "ppo_clip": {"dual_clip": 1.5}}
MODES = {
    **{f"{loss} {mode}": {"loss": loss, "loss_aggregation": mode, **CLIPS.get(loss, {})}
       for loss in ("ppo_clip", "gspo", "cispo", "policy_gradient")
       for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_constant")},
    **{advantage: {"advantage": advantage, "pass_k": 2, "kl_in": "reward"}
       for advantage in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "pass_at_k", "gae")},
    **{kind: {"correction": kind, "correction_cap": cap}
       for kind, cap in (("token_tis", 1.5), ("sequence_tis", 1.5), ("sequence_reject", 8.0))},
    **{kind: {"kl_estimator": kind} for kind in ("k2", "k3")},
    "dapo": {"mask_truncated": True, "overlong_buffer": 2, "scale_rewards": False},
}


def train_all(workers, plugins, config, batch):
    """One update in each mode, one after the other on the same models: metrics and weights after each."""
    from dataclasses import replace

    from rlrun.algorithms.policy_gradient import PolicyAlgorithm
    from rlrun.batch import Batch
    from rlrun.metrics import merge, results
    from rlrun.workers.protocol import RoleRequest

    path, dtype, sgd = config.ref.path, config.model.dtype, config.actor.optim
    requests = {"actor": RoleRequest(True, config.model.path, dtype, optim=sgd), "ref": RoleRequest(False, path, dtype),
                "critic": RoleRequest(True, path, dtype, head="value", optim=sgd)}
    for role, request in requests.items():
        want = frozenset({"values"} if role == "critic" else {"log_probs", "entropy"})
        workers.build(role, request, len(MODES), want)
        if role != "actor":
            [(output, column)] = workers.forward(role, batch, {"values"} if role == "critic" else {"log_probs"}, 0.8).items()
            batch.tokens[{"log_probs": "ref_log_probs"}.get(output, output)] = column
    rows, weights = [], {}
    for name, options in MODES.items():
        options = replace(config.stages[0].algorithm, **{"kl_coef": 0.1, "entropy_coef": 0.05, **options})
        algorithm = PolicyAlgorithm(config, replace(config.stages[0], algorithm=options))
        b = Batch(batch.cu_seqlens, dict(batch.tokens), dict(batch.sequences))
        old = workers.forward("actor", b, {"log_probs"}, algorithm.temperature)["log_probs"]
        b.tokens["log_probs"] = old + b.tokens["drift"]  # of an older policy: ratios are not 1
        parts = [algorithm.advantages(b)]
        for role, loss in algorithm.losses(0).items():
            update = workers.update(role, b, loss, b.denominators(), algorithm.temperature)
            parts.append({f"{role}/{key}" if "/" not in key else key: value for key, value in update.items()})
            weights[f"{name} {role}"] = workers.call("weights", role)[0]
        rows.append({"mode": float(len(rows)), **results(merge(parts))})
    return rows, weights


def test_every_mode(gpt2, other, ranks1, ranks2, tmp_path):  # noqa: F811
    """Cases 82, 83, 98: every loss with every aggregation, every advantage, correction and KL estimator, in float64: weights and
    all logged numbers are those of one rank and one micro-batch, with ratios that clip, truncated samples and a KL."""
    config, batch = write(tmp_path, gpt2, other, {"name": "grpo"}), recorded()
    generator = torch.Generator().manual_seed(2)
    batch.tokens["drift"] = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64) * 0.3
    batch.sequences["baseline_reward"] = (batch.sequences["group"] % 3).double()
    config.actor.optim.lr = 0.02
    expected = drive(ranks1, config, train_all, batch)
    for row, name in zip(expected[0], MODES, strict=True):
        assert row["actor/grad_norm"] > 1e-3, name
        assert ("policy_gradient" in name) == (row["actor/pg_clipfrac"] == 0), name
        assert 0 < row.get("correction/rejected", 0.5) < 1 or name.endswith("tis")
    assert 0 < expected[0][0]["actor/pg_clipfrac_lower"] < 1
    assert moved(gpt2, expected[1]["dapo actor"]) > 0.01
    config.actor.tokens_per_micro_batch = 40
    shuffled = batch.select(torch.randperm(len(batch), generator=generator))
    assert_same(drive(ranks2, config, train_all, shuffled), expected, 1e-9)
