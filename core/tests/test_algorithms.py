"""Advantages, KL estimators and losses against closed forms and float64 references."""

from types import SimpleNamespace

import pytest
import torch

from rlrun.algorithms import advantages, kl
from rlrun.algorithms.losses import PolicyLoss, SftLoss, ValueLoss, aggregate
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


def test_kl_estimators_values_and_expected_gradients():
    """Case 90: values at d = .5 and -1; exact expected gradients on a 3-way softmax."""
    for d, values in {0.5: (0.5, 0.125, 0.10653), -1.0: (-1, 0.5, 0.71828)}.items():
        for kind, value in zip(("k1", "k2", "k3"), values):
            assert kl.estimate(torch.tensor(d), torch.tensor(0.0), kind).item() == pytest.approx(value, abs=1e-5)
    torch.manual_seed(0)
    logits, ref = torch.randn(3, **T64, requires_grad=True), torch.randn(3, **T64).log_softmax(0)
    p = logits.log_softmax(0)
    true = torch.autograd.grad((p.exp() * (p - ref)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - p)).sum(), logits, retain_graph=True)[0]
    for kind, expected in (("k1", torch.zeros(3, **T64)), ("k2", true), ("k3", forward)):
        expectation = (p.exp().detach() * kl.estimate(p, ref, kind)).sum()
        got = torch.autograd.grad(expectation, logits, retain_graph=True)[0]
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_adaptive_kl_moves_towards_its_target():
    """Case 51 (the kind): the coefficient's rule, Ziegler et al. with error clipped at 0.2."""
    c = kl.KlCoefficient(0.1, target=0.02, horizon=1000)
    c.update(0.02 * 1.1, 100)
    assert c.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    c.update(5.0, 100)
    assert c.value == pytest.approx(0.101 * 1.02)
    fixed = kl.KlCoefficient(0.1)
    fixed.update(5.0, 100)
    assert fixed.value == 0.1


def test_aggregations():
    """Case 82: token losses [[1,1,1,1],[5]]: 1.8, 3.0 and 4.5."""
    batch, losses = ragged([4, 1]), torch.tensor([1.0, 1, 1, 1, 5])
    counts = batch.denominators()
    for mode, expected in (("token_mean", 1.8), ("seq_mean_token_mean", 3.0), ("seq_mean_token_sum", 4.5)):
        total, kind = aggregate(losses, batch, mode)
        assert float(total) / counts[kind] == pytest.approx(expected)


def test_policy_loss_clips():
    """Case 92 without dual clip: eps .2, and .28 above."""
    ratios = torch.tensor([0.5, 1, 1.5, 5], **T64)
    for advantage, high, expected in ((1.0, 0.2, [-0.5, -1, -1.2, -1.2]), (-1.0, 0.2, [0.8, 1, 1.5, 5])):
        for ratio, value in zip(ratios, expected):
            batch = ragged([1])
            batch.tokens |= {"advantages": torch.full((2,), advantage, **T64), "log_probs": torch.zeros(2, **T64)}
            terms = PolicyLoss(0.2, high, "token_mean")({"log_probs": ratio.log().expand(2)}, batch)
            assert terms["actor/pg_loss"].sum.item() == pytest.approx(value)
    for ratio, value, clipped in ((1.27, -1.27, 0), (1.3, -1.28, 1)):
        batch = ragged([1])
        batch.tokens |= {"advantages": torch.ones(2, **T64), "log_probs": torch.zeros(2, **T64)}
        terms = PolicyLoss(0.2, 0.28, "token_mean")({"log_probs": torch.tensor(ratio, **T64).log().expand(2)}, batch)
        assert terms["actor/pg_loss"].sum.item() == pytest.approx(value)
        assert terms["actor/pg_clipfrac"].sum.item() == clipped


LOSSES = {
    "policy": PolicyLoss(0.2, 0.3, "seq_mean_token_mean", 0.1, "k3", 0.01),
    "value": ValueLoss(0.2),
    "sft": SftLoss("token_mean"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e6])
def test_masked_slots_change_nothing(name, poison):
    """Case 89: NaN, inf or 1e6 in every slot outside the mask: loss and gradient bit-equal to zeros there."""

    def run(fill):
        torch.manual_seed(1)
        batch = ragged([3, 0, 2], prompt=2)
        mask = batch.tokens["loss_mask"]
        columns = {n: torch.randn(11) for n in ("advantages", "log_probs", "ref_log_probs", "values", "returns",
                                                "rollout_log_probs")}
        outputs = {n: torch.randn(11) for n in ("log_probs", "entropy", "values")}
        for column in [*columns.values(), *outputs.values()]:
            column[~mask] = fill
        for column in outputs.values():
            column.requires_grad_()
        batch.tokens |= columns | {"gap_mask": mask}
        terms = LOSSES[name](outputs, batch)
        loss = sum(t.coef * t.sum for t in terms.values())
        loss.backward()
        return [t.sum.detach() for t in terms.values()], {n: o.grad for n, o in outputs.items()}

    clean, clean_grads = run(0.0)
    dirty, dirty_grads = run(poison)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    for n, grad in clean_grads.items():
        assert grad is None or torch.equal(grad, dirty_grads[n])


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
