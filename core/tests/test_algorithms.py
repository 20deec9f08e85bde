"""Advantages, KL estimators and losses against closed forms and float64 references."""

from types import SimpleNamespace

import pytest
import torch

from rlrun.algorithms import advantages
from rlrun.algorithms.coefficients import KlCoefficient
from rlrun.batch import Batch

T64 = dict(dtype=torch.float64)


def ragged(lengths, prompt=1):
    rows = [{"ids": list(range(prompt + n)), "loss_mask": [False] * prompt + [True] * n} for n in lengths]
    return Batch.from_sequences(rows)


def test_grpo_closed_forms():
    """Case 4: scale_rewards changes the maths; values of GRPO on [1,0,0,0]."""
    r, g = torch.tensor([1.0, 0, 0, 0], **T64), torch.zeros(4, dtype=torch.int64)
    assert advantages.grpo(r, g, scale=False).tolist() == [0.75, -0.25, -0.25, -0.25]
    torch.testing.assert_close(advantages.grpo(r, g, eps=0.0), torch.tensor([1.5, -0.5, -0.5, -0.5], **T64))


def test_groups_go_by_id_not_by_position():
    """Case 94 and 17: interleaved groups; the flat group has exactly 0."""
    r, g = torch.tensor([1.0, 1, 0, 1]), torch.tensor([5, 2, 5, 2])
    expected = torch.tensor([0.5**0.5, 0, -(0.5**0.5), 0])
    torch.testing.assert_close(advantages.grpo(r, g), expected, atol=2e-6, rtol=0)
    order = [2, 3, 0, 1]
    assert torch.equal(advantages.grpo(r[order], g[order]), advantages.grpo(r, g)[order])


@pytest.mark.parametrize("value", [0.35, 0.95, 0.1])
def test_equal_rewards_have_no_advantage(value):
    """Trap 3 and case 80: rounding noise of equal rewards is not scaled up to a signal."""
    r, g = torch.full((8,), value), torch.zeros(8, dtype=torch.int64)
    assert not advantages.grpo(r, g).any()
    assert not advantages.rloo(r, g).any()


def test_rloo_and_singletons():
    """Case 79: a group of one has advantage 0 in every variant; the others are not affected."""
    r, g = torch.tensor([1.0, 0, 0, 0, 9], **T64), torch.tensor([1, 1, 1, 1, 2])
    torch.testing.assert_close(advantages.rloo(r, g), torch.tensor([1, -1 / 3, -1 / 3, -1 / 3, 0], **T64))
    r, g = torch.tensor([1.0, 0, 0.5, 3], **T64), torch.tensor([0, 0, 0, 1])
    for variant in (advantages.rloo, advantages.grpo):
        together = variant(r, g)
        assert together[3] == 0
        torch.testing.assert_close(together[:3], variant(r[:3], g[:3]))
        assert torch.isfinite(together).all()


def test_dropped_sample_leaves_the_others_as_a_group_without_it():
    """Case 20: [1, None, 0, 0] drops the second; the rest is [2/3, -1/3, -1/3]."""
    got = advantages.grpo(torch.tensor([1.0, 0, 0], **T64), torch.zeros(3, dtype=torch.int64), scale=False)
    torch.testing.assert_close(got, torch.tensor([2 / 3, -1 / 3, -1 / 3], **T64))


def test_empty_response_has_no_reward_anywhere():
    """Case 18: the reward of an empty response lands on no token, not on the last one of its neighbour."""
    batch = ragged([0, 2])
    placed = advantages.at_last_token(torch.tensor([10.0, 0.5]), batch)
    assert placed.tolist() == [0, 0, 0, 0.5]
    assert advantages.at_last_token(torch.tensor([0.5, 10.0]), ragged([2, 0])).tolist() == [0, 0, 0.5, 0]


def test_gae_ignores_what_the_mask_leaves_out():
    """Case 86: a value in a masked slot does not leak; gamma 1, lambda .95."""
    batch = Batch.from_sequences([{"ids": [0, 1, 2], "loss_mask": [True, True, False]}])
    adv, returns = advantages.gae(torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 0, 100]), batch, 1.0, 0.95)
    torch.testing.assert_close(adv, torch.tensor([0.95, 1.0, 0.0]))
    torch.testing.assert_close(returns, torch.tensor([0.95, 1.0, 0.0]))


def test_gae_equals_the_definition():
    """Against sum_k (gamma lam)^k delta_{t+k} in float64, ragged, with a gap inside one sequence."""
    torch.manual_seed(0)
    masks = [[False, True, True, False, True], [False, False], [False, True, True, True, True, True]]
    batch = Batch.from_sequences([{"ids": [0] * len(m), "loss_mask": m} for m in masks])
    rewards, values = torch.randn(13, **T64), torch.randn(13, **T64)
    gamma, lam = 0.9, 0.8
    expected = torch.zeros(13, **T64)
    for s, m in enumerate(masks):
        at = [int(batch.cu_seqlens[s]) + i for i, on in enumerate(m) if on]
        deltas = [rewards[t] + (gamma * values[at[i + 1]] if i + 1 < len(at) else 0) - values[t] for i, t in enumerate(at)]
        for i, t in enumerate(at):
            expected[t] = sum((gamma * lam) ** k * d for k, d in enumerate(deltas[i:]))
    adv, returns = advantages.gae(rewards, values, batch, gamma, lam)
    torch.testing.assert_close(adv, expected, atol=1e-12, rtol=0)
    mask = batch.tokens["loss_mask"]
    torch.testing.assert_close(returns[mask], (expected + values)[mask], atol=1e-12, rtol=0)


def test_whiten_over_the_mask_alone():
    adv, mask = torch.tensor([1.0, 2, 3, 99], **T64), torch.tensor([True, True, True, False])
    assert advantages.whiten(adv, mask).tolist() == [-1, 0, 1, 0]
    assert not advantages.whiten(torch.full((4,), 0.35), mask).any()


def test_adaptive_kl_moves_towards_its_target():
    """Case 51 (the kind): the coefficient's rule, Ziegler et al. with error clipped at 0.2."""
    c = KlCoefficient(0.1, target=0.02, horizon=1000)
    c.update(0.02 * 1.1, 100)
    assert c.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    c.update(5.0, 100)
    assert c.value == pytest.approx(0.101 * 1.02)
    fixed = KlCoefficient(0.1)
    fixed.update(5.0, 100)
    assert fixed.value == 0.1


def test_kl_in_reward_reaches_advantages_and_adapts():
    """Case 51: coefficient round trip; the penalty is taken with the coefficient from before the step's adaptation."""
    from rlrun.algorithms.policy_gradient import PolicyAlgorithm
    from rlrun.config.schema import AlgorithmConfig

    options = AlgorithmConfig(advantage="rloo", kl_coef=0.5, kl_in="reward", kl_estimator="k1", kl_target=0.01, kl_horizon=100)
    algorithm = PolicyAlgorithm(SimpleNamespace(), SimpleNamespace(algorithm=options))
    batch = ragged([2, 1])
    mask = batch.tokens["loss_mask"]
    batch.sequences |= {"reward": torch.tensor([1.0, 0.0]), "group": torch.tensor([4, 4])}
    batch.tokens |= {"log_probs": torch.tensor([9.0, -1, -1, 9, -2]), "ref_log_probs": torch.tensor([0.0, -1.5, -1, 0, -1])}
    algorithm.advantages(batch)
    # sequence totals: 1 - .5 * .5 = .75 and 0 - .5 * -1 = .5
    torch.testing.assert_close(batch.tokens["advantages"][mask], torch.tensor([0.25, 0.25, -0.25]))
    assert algorithm.kl_coef.value == pytest.approx(0.5 * (1 - 0.2 * 2 / 100))
    other = PolicyAlgorithm(SimpleNamespace(), SimpleNamespace(algorithm=options))
    other.load_state_dict(algorithm.state_dict())
    assert other.kl_coef.value == algorithm.kl_coef.value
