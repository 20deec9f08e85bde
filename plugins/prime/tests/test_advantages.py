"""Advantages against the paper's equations, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from rlrun_prime.advantages import leave_one_out, normalised, whiten

MASK = [[1, 1, 0], [1, 1, 1]]
RM = [[0.2, 0.4, math.nan], [0.1, -0.3, 0.5]]
RAGGED = [[1], [1, 1, 0, 1, 1], [0, 0], [1, 1, 1], [1, 1], [1, 0, 1], [1, 1]]
GROUPS = [5, 3, 5, 3, 5, 3, 9]
"""Out of order, one sample without a token, one group of one."""
OUTCOMES = [1.0, 0.0, 1.0, 0.25, 0.0, 1.0, 1.0]


def case76(tools):
    return tools.ragged(MASK, [7, 7], [1, 0], rewards=RM)


def drawn(tools, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = [[torch.randn((), generator=generator, dtype=torch.float64).item() if m else math.nan for m in row]
               for row in RAGGED]
    return tools.ragged(RAGGED, GROUPS, OUTCOMES, process_rewards=rewards), rewards


def paper(rewards, form, gamma=1.0, outcome=1.0, process=1.0):
    """Equations 5 (rloo), 7 (grpo) and 8 (reinforce_pp) of arXiv 2502.01456, token by token; NaN where there is no token."""
    tokens = [[r for r, m in zip(row, mask) if m] for row, mask in zip(rewards, RAGGED)]
    found = []
    for i, mine in enumerate(tokens):
        group = [j for j, g in enumerate(GROUPS) if g == GROUPS[i]]
        means = {j: sum(tokens[j]) / len(tokens[j]) for j in group if tokens[j]}
        if form == "rloo":
            others, rest = [means[j] for j in means if j != i], [OUTCOMES[j] for j in group if j != i]
            whole = OUTCOMES[i] - sum(rest) / len(rest) if rest else 0.0
            steps = [r - sum(others) / len(others) if others else 0.0 for r in mine]
        elif form == "grpo":
            def z(x, values, eps=0.0, floor=0.0):
                mean = sum(values) / len(values)
                std = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
                return (x - mean) / (max(std, floor) + eps) if len(values) > 1 else 0.0

            whole = z(OUTCOMES[i], [OUTCOMES[j] for j in group], eps=1e-6)
            steps = [z(r, list(means.values())) for r in mine]
        else:
            whole, steps = OUTCOMES[i], mine
        found.append([outcome * whole + process * sum(gamma ** (s - t) * steps[s] for s in range(t, len(steps)))
                      for t in range(len(steps))])
    return found


def test_case_76_both_forms(tools):
    """Case 76: the reference code's process part scales by n/(n-1), the paper's is the plain difference; sample means agree."""
    batch = case76(tools)
    scaled, plain = (leave_one_out(batch.tokens["rewards"], batch, s) for s in (True, False))
    assert tools.of_rows(scaled, batch) == [pytest.approx([0, 0.4, 0]), pytest.approx([-0.2, -1, 0.6])]
    assert tools.of_rows(plain, batch) == [pytest.approx([0.1, 0.3, 0]), pytest.approx([-0.2, -0.6, 0.2])]
    for column in (scaled, plain):
        assert (batch.sums(column) / batch.loss_lengths()).tolist() == pytest.approx([0.2, -0.2])


def advantages(tools, batch, prime=None, **algorithm):
    a = tools.make(prime, **algorithm)
    a.steps = 1
    batch.tokens.setdefault("process_rewards", batch.tokens.get("rewards"))
    metrics = a.advantages(batch)
    assert not metrics
    return batch.tokens["advantages"]


def test_case_76_through_the_algorithm(tools):
    """Case 76: whitened with the unbiased variance; unwhitened returns are [1.4 1.4], [-1.6 -1.4 -.4]. Paper: no whitening."""
    batch = case76(tools)
    got = tools.of_rows(advantages(tools, batch, {"advantage": "reference"}), batch)
    assert got == [pytest.approx([1.0410, 1.0410, 0], abs=5e-5), pytest.approx([-1.0136, -0.8766, -0.1918], abs=5e-5)]
    got = tools.of_rows(advantages(tools, case76(tools)), batch)
    assert got == [pytest.approx([1.4, 1.3, 0]), pytest.approx([-1.6, -1.4, -0.8])]


@pytest.mark.parametrize("form", ["rloo", "grpo", "reinforce_pp"])
def test_the_papers_equations(tools, form):
    """Equations 5, 7, 8: ragged groups by id in any order, a masked token within, an empty sample, a group of one; outcomes
    undiscounted, process rewards discounted; both coefficients; the same for any order of rows."""
    batch, rewards = drawn(tools)
    want = paper(rewards, form, 0.9, 2.0, 0.5)
    column = advantages(tools, batch, {"outcome_coef": 2.0, "process_coef": 0.5}, advantage=form, gamma=0.9)
    got = [row[row != 0].tolist() for row in column.split(batch.lengths.tolist())]
    for mine, expected in zip(got, want):
        assert mine == pytest.approx([x for x in expected if x], abs=1e-12)
    order = torch.tensor([4, 6, 2, 0, 5, 1, 3])
    shuffled = batch.select(order)
    again = advantages(tools, shuffled, {"outcome_coef": 2.0, "process_coef": 0.5}, advantage=form, gamma=0.9)
    torch.testing.assert_close(batch.select(order).tokens["advantages"], again, atol=1e-12, rtol=0)
    if form != "reinforce_pp":
        assert got[6] == []  # one sample: nothing to compare


def test_reference_form_normalises_over_the_whole_batch(tools):
    """Mean 0, unbiased deviation 1 over all tokens in the loss; only the ratio of the coefficients matters."""
    a, b = (advantages(tools, drawn(tools)[0], {"advantage": "reference", "outcome_coef": c, "process_coef": 2 * c})
            for c in (1, 5))
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    chosen = a[drawn(tools)[0].tokens["loss_mask"]]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-12)
    assert float(chosen.std()) == pytest.approx(1, abs=1e-12)


def test_gae_takes_process_rewards_as_rewards(tools):
    """PPO with process rewards: with values of 0 and lambda 1 the returns are the rewards' sums to the end."""
    batch, rewards = drawn(tools)
    batch.tokens["values"] = torch.zeros_like(batch.tokens["process_rewards"])
    advantages(tools, batch, {"process_coef": 0.5}, advantage="gae", lam=1.0)
    for i, (part, mask) in enumerate(zip(batch.tokens["returns"].split(batch.lengths.tolist()), RAGGED)):
        own = [0.5 * r for r, m in zip(rewards[i], mask) if m]
        assert [float(x) for x, m in zip(part[1:], mask) if m] == pytest.approx(
            [sum(own[t:]) + OUTCOMES[i] for t in range(len(own))], abs=1e-6)


@pytest.mark.parametrize("form", ["rloo", "grpo"])
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_no_signal_is_not_blown_up(tools, form, noise):
    """Equal outcomes and process rewards that are 0, or their rounding: advantages stay as small, in both forms."""
    for name in ("paper", "reference"):
        batch, _ = drawn(tools)
        batch.sequences["reward"] = torch.full((7,), 0.7, dtype=torch.float64)
        batch.tokens["process_rewards"] = batch.tokens["process_rewards"] * noise + (0.1 if noise else 0.0)
        got = advantages(tools, batch, {"advantage": name}, advantage=form)
        assert bool(got.isfinite().all())
        assert float(got.abs().max()) < 0.01
        assert noise or not got.any()


def test_unselected_slots_change_nothing(tools):
    """Case 89: NaN (in all tests above), inf or numbers outside the mask, to the last bit."""
    for form in ("rloo", "grpo", "reinforce_pp"):
        first = advantages(tools, drawn(tools)[0], {"advantage": "reference"}, advantage=form)
        batch, _ = drawn(tools)
        batch.tokens["process_rewards"] = torch.where(batch.tokens["loss_mask"], batch.tokens["process_rewards"], math.inf)
        assert torch.equal(first, advantages(tools, batch, {"advantage": "reference"}, advantage=form))


def test_empty_batches(tools):
    """No sample has a token: no number, and no error."""
    batch = tools.ragged([[0, 0], [0]], [1, 1], [0, 1], process_rewards=[[math.nan] * 2, [math.nan]])
    rewards = batch.tokens["process_rewards"]
    for column in (leave_one_out(rewards, batch), normalised(rewards, batch, True, 0),
                   whiten(rewards, batch.tokens["loss_mask"], 0.1)):
        assert not column.any()
    for form in ("rloo", "grpo", "reinforce_pp"):
        assert not advantages(tools, batch, {"advantage": "reference"}, advantage=form).any()


def test_warm_up_takes_outcomes_alone(tools):
    """In the first `warmup_steps` steps, advantages are those of the outcomes."""
    a = tools.make({"warmup_steps": 2})
    for step in (1, 2, 3):
        batch, _ = drawn(tools)
        a.steps = step
        a.advantages(batch)
        alone = batch.tokens["advantages"].unique().numel() == len({-0.625, 0.875, -0.25, 0.5, -1.0, 0.0})
        assert alone == (step <= 2), step
