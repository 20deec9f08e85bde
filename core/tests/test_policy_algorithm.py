"""What surrounds the losses: off-policy correction, reward shaping, filters, coefficients that adapt, warnings."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from rlrun.algorithms import policy_gradient
from rlrun.algorithms.coefficients import EntropyCoefficient
from rlrun.algorithms.correction import correct
from rlrun.algorithms.policy_gradient import PolicyAlgorithm, overlong
from rlrun.batch import Batch
from rlrun.config.schema import AlgorithmConfig
from rlrun.metrics import data_metrics, results

T64 = dict(dtype=torch.float64)


def algorithm(**options):
    return PolicyAlgorithm(SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=10)),
                           SimpleNamespace(algorithm=AlgorithmConfig(**options)))


def ragged(lengths, **columns):
    """Sequences of one prompt token and `lengths` others, in groups of two; columns are given for the others alone."""
    batch = Batch.from_sequences([{"ids": [0] * (1 + n), "loss_mask": [False] + [True] * n} for n in lengths])
    mask = batch.tokens["loss_mask"]
    for name, values in columns.items():
        batch.tokens[name] = torch.full(mask.shape, math.nan, **T64).masked_scatter(mask, torch.tensor(values, **T64))
    n = len(lengths)
    batch.sequences |= {"group": torch.arange(n) // 2, "reward": torch.arange(n, **T64) % 2, "finish_reason": ["stop"] * n}
    return batch


D = [0.5, -1.0, 2.0, 0.1, 0.2, -0.3, 1.2]
"""log pi - log mu of sequences of 2, 0, 1 and 4 tokens, whose sums are -.5, 0, 2 and 1.2."""


def corrected(kind, cap=2.0):
    batch = ragged([2, 0, 1, 4], log_probs=[d - 3 for d in D], rollout_log_probs=[-3.0] * 7)
    return batch, correct(batch, kind, cap)


def ess(log_ratios):
    w = [math.exp(d) for d in log_ratios]
    return sum(w) ** 2 / (len(w) * sum(x * x for x in w))


def test_truncated_importance_sampling_by_token():
    """Yao et al. 2025: min(pi / mu, cap) of each token; the effective sample size is that of the ratios themselves."""
    batch, (weights, rejected, metrics) = corrected("token_tis")
    mask, expected = batch.tokens["loss_mask"], torch.tensor([min(math.exp(d), 2.0) for d in D], **T64)
    torch.testing.assert_close(weights[mask], expected, atol=1e-12, rtol=0)
    assert not weights[~mask].any()
    assert not rejected.any()
    assert results(metrics) == pytest.approx({
        "correction/weight": float(expected.mean()), "correction/rejected": 0.0, "correction/effective_sample_size": ess(D)})


def test_truncated_importance_sampling_by_sequence():
    """One weight a sequence, min(product of its ratios, cap); an empty completion counts nowhere."""
    batch, (weights, rejected, metrics) = corrected("sequence_tis")
    mask, each = batch.tokens["loss_mask"], [math.exp(-0.5), 2.0, 2.0]
    torch.testing.assert_close(weights[mask], torch.tensor([each[0]] * 2 + each[1:2] + each[2:] * 4, **T64), atol=1e-12, rtol=0)
    assert results(metrics) == pytest.approx({
        "correction/weight": sum(each) / 3, "correction/rejected": 0.0, "correction/effective_sample_size": ess([-0.5, 2, 1.2])})
    assert not rejected.any()


def test_rejection_of_sequences():
    """Outside [1 / cap, cap] on either side, or not a number, is rejected; the others weigh 1, whatever cap is."""
    batch, (weights, rejected, metrics) = corrected("sequence_reject", 4.0)
    assert rejected.tolist() == [False, False, True, False]
    assert weights[batch.tokens["loss_mask"]].tolist() == [1, 1, 0, 1, 1, 1, 1]
    assert results(metrics)["correction/rejected"] == pytest.approx(1 / 3)
    assert corrected("sequence_reject", 1.5)[1].rejected.tolist() == [True, False, True, True]
    batch.tokens["rollout_log_probs"][2] = math.nan
    assert correct(batch, "sequence_reject", 1e9).rejected.tolist() == [True, False, False, False]


def test_unselected_slots_change_no_correction():
    """Case 89: what stands outside the mask (NaN in the tests above) changes no bit."""
    for kind in ("token_tis", "sequence_tis", "sequence_reject"):
        batch, first = corrected(kind)
        for name, fill in (("log_probs", 1e6), ("rollout_log_probs", math.inf)):
            batch.tokens[name] = torch.where(batch.tokens["loss_mask"], batch.tokens[name], fill)
        again = correct(batch, kind, 2.0)
        assert torch.equal(again.weights, first.weights)
        assert again.metrics == first.metrics


def test_correction_weighs_the_policy_loss():
    """Each token's loss times its weight, and rejected samples leave losses and denominators, not the group's baseline."""
    batch, weights = corrected("token_tis")[0], corrected("token_tis")[1].weights
    plain = algorithm(advantage="rloo")
    plain.advantages(batch)
    mask, wanted = batch.tokens["loss_mask"], batch.tokens["advantages"] * weights
    a = algorithm(advantage="rloo", correction="token_tis")
    assert a.needs_old_log_probs
    a.advantages(batch)
    [loss] = a.losses(0).values()
    new = torch.where(mask, batch.tokens["log_probs"], 0)
    assert loss({"log_probs": new}, batch)["actor/pg_loss"].sum.item() == pytest.approx(-float(wanted[mask].sum()), rel=1e-12)
    batch = corrected("token_tis")[0]
    batch.tokens["gap_mask"] = mask.clone()
    algorithm(advantage="rloo", correction="sequence_reject", correction_cap=4.0).advantages(batch)
    assert batch.denominators() == {"tokens": 6, "sequences": 2, "constant": 1, "gap": 6, "groups": 2}
    assert batch.tokens["advantages"][mask].tolist() == [-1, -1, -1, 1, 1, 1, 1]
    assert batch.tokens["response_mask"].sum() == 7


def test_overlong_punishment():
    """arXiv 2503.14476, equation 13, longest 10, buffer 4: 0 up to 6 tokens, -1 at 10 and beyond."""
    assert overlong(torch.tensor([0, 6, 7, 8, 9, 10, 11]), 10, 4).tolist() == [0, 0, -0.25, -0.5, -0.75, -1, -1]
    batch = ragged([10, 6, 8, 3])
    metrics = algorithm(advantage="rloo", overlong_buffer=4).advantages(batch)
    # rewards 0, 1, 0, 1 become -1, 1, -0.5, 1
    torch.testing.assert_close(batch.sums(batch.tokens["token_rewards"]), torch.tensor([-1.0, 1, -0.5, 1], **T64))
    assert batch.sums(batch.tokens["advantages"]).tolist() == [-20, 12, -12, 4.5]
    assert batch.sequences["reward"].tolist() == [0, 1, 0, 1]
    assert results(metrics)["reward/overlong"] == -0.375


def test_advantages_are_of_tokens():
    """A plugin's `estimate` that gives one advantage a sample is told so, by its name."""
    class Mine(PolicyAlgorithm):
        def estimate(self, batch, totals):
            return totals

    made = Mine(SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=10)), SimpleNamespace(algorithm=AlgorithmConfig()))
    with pytest.raises(ValueError, match=r"Mine.estimate returned \[2\] advantages for 2 samples; there must be one a token"):
        made.advantages(ragged([2, 3]))


def test_truncated_samples_leave_the_losses():
    """DAPO's overlong filtering: a sample that hit the limit has no gradient; its group's baseline and the metrics see it."""
    batch, whole = ragged([10, 2, 4, 4]), ragged([10, 2, 4, 4])
    for b in (batch, whole):
        b.sequences["finish_reason"] = ["length", "stop", "stop", "length"]
    metrics = algorithm(mask_truncated=True).advantages(batch)
    algorithm().advantages(whole)
    assert batch.loss_lengths().tolist() == [0, 2, 4, 0]
    assert batch.denominators()["sequences"] == 2
    assert results(metrics)["response/masked_ratio"] == 0.5
    assert torch.equal(batch.tokens["advantages"], whole.tokens["advantages"])
    seen, expected = (results(data_metrics(b, 10, 10)) for b in (batch, whole))
    for name in expected:
        if "advantages" not in name:
            assert seen[name] == expected[name], name


def test_dynamic_sampling_drops_flat_groups():
    """arXiv 2503.14476, equation 11: a group whose rewards are equal, also one of one, is dropped, where so configured."""
    def group(*rewards):
        batch = ragged([1] * len(rewards))
        batch.sequences["reward"] = torch.tensor(rewards)
        return batch

    groups = [group(0.95, 0.95, 0.95), group(1.0, 0.0), group(0.0, 0.0), group(0.5), group(0.5, 0.5, 0.6)]
    assert algorithm(filter_groups=True).select(groups) == [False, True, False, False, True]
    assert algorithm().select(groups) == [True] * 5


def test_entropy_target():
    """Up by .005 while the entropy is below, down while it is above and then not applied, never below 0; survives a restart."""
    c = EntropyCoefficient(0.0, target=0.5)
    for entropy, value, raw in ((0.4, 0.005, 0.005), (0.4, 0.01, 0.01), (0.6, 0.0, 0.005), (0.4, 0.01, 0.01),
                                (0.6, 0.0, 0.005), (0.6, 0.0, 0.0), (0.6, 0.0, 0.0)):
        c.update(entropy)
        assert (c.value, c.raw) == pytest.approx((value, raw))
    fixed = EntropyCoefficient(0.1)
    fixed.update(9.0)
    assert fixed.value == 0.1
    a, b = (algorithm(entropy_target=0.5, entropy_coef=0.02) for _ in range(2))
    a.observe({"actor/entropy": 0.6})
    a.observe({"critic/vf_loss": 1.0})
    assert a.losses(0)["actor"].entropy_coef == 0
    b.load_state_dict(a.state_dict())
    for one in (a, b):
        one.observe({"actor/entropy": 0.1})
        assert one.losses(0)["actor"].entropy_coef == pytest.approx(0.02)


def test_an_estimator_without_the_kls_gradient_warns_once(caplog):
    """Case 90: k3 as a loss has the forward KL's gradient."""
    policy_gradient._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for options in ({"kl_estimator": "k3", "kl_in": "reward"}, {"kl_estimator": "k2"}, {}, {"kl_estimator": "k3"},
                        {"kl_estimator": "k3"}):
            algorithm(kl_coef=0.1, **options)
        algorithm(kl_estimator="k3")
    assert len(caplog.records) == 1
    assert "k3 as a loss has the gradient of the forward KL" in caplog.text
