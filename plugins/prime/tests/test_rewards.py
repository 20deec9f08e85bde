"""Implicit rewards and what the reward model learns by, against closed forms and the paper's equations."""

from __future__ import annotations

import math

import pytest
import torch

from rlrun_prime.rewards import REFERENCE, ImplicitRewardLoss, agreement, delimited, gathered, implicit, pairs

MASK = [[1, 1, 0], [1, 1, 1]]
SCORES = [[1.0, 2.0, 9.0], [-1.0, 0.0, 3.0]]
GROUPS = [4, 2, 4, 2, 4, 2]
CORRECT = [1.0, 0.0, 0.0, 0.5, 0.25, 0.5]
MASKS = [[1, 1], [1, 0, 1], [1], [1, 1, 1], [1, 1], [0, 0]]


def loss_of(batch, loss, log_probs):
    [term] = loss({"log_probs": log_probs}, batch).values()
    return term.sum / loss.denominators(batch)[0][term.kind]


def case77(tools, pad=9.0):
    scores = [[1.0, 2.0, pad], SCORES[1]]
    batch = tools.ragged(MASK, [0, 0], [1, 0], scores=scores, **{REFERENCE: [[0.0] * 3] * 2})
    return batch, batch.tokens["scores"]


def drawn(tools):
    generator = torch.Generator().manual_seed(1)

    def rows():
        return [[torch.randn((), generator=generator, dtype=torch.float64).item() * 3 if m else math.nan for m in row]
                for row in MASKS]

    batch = tools.ragged(MASKS, GROUPS, CORRECT, log_probs=rows(), **{REFERENCE: rows()})
    return batch, batch.tokens["log_probs"]


def test_case_77(tools):
    """Case 77: with beta .05 the cross-entropy is .68268; the masked pad's 9 does not leak (.59094), nor does NaN."""
    loss = ImplicitRewardLoss(0.05, "ce")
    for pad in (9.0, math.nan, -math.inf):
        assert float(loss_of(*[case77(tools, pad)[0], loss, case77(tools, pad)[1]])) == pytest.approx(0.68268, abs=5e-6)
    batch, scores = case77(tools)
    batch.tokens["loss_mask"] = batch.position_ids > 0
    assert float(loss_of(batch, loss, scores)) == pytest.approx(0.59094, abs=5e-6)


@pytest.mark.parametrize("kind", ["ce", "dpo"])
def test_ln_2_at_the_start(tools, kind):
    """Case 77: a model equal to its reference gives rewards of exactly 0, loss ln 2, pair accuracy 1/2."""
    batch, log_probs = drawn(tools)
    batch.tokens[REFERENCE] = log_probs.clone()
    assert float(loss_of(batch, ImplicitRewardLoss(0.05, kind), log_probs)) == pytest.approx(math.log(2), abs=1e-12)
    rewards = implicit(log_probs, batch, 0.05)
    assert not rewards.any()
    found = agreement(batch.sums(rewards), batch.sequences["correct"], batch.sequences["group"])
    assert found == {"reward_mean": 0.0, "reward_std": 0.0, "sign_accuracy": 0.5, "pair_accuracy": 0.5}


def references(batch, log_probs, kind, beta):
    """The loss from sums by sequence: sigmoids, pairs and means written out."""
    total = []
    for row in range(len(batch)):
        at = [t for t in range(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])) if batch.tokens["loss_mask"][t]]
        total.append(beta * sum(log_probs[t] - batch.tokens[REFERENCE][t] for t in at) if at else None)
    if kind == "ce":
        terms = [-(c * torch.sigmoid(r).log() + (1 - c) * (1 - torch.sigmoid(r)).log())
                 for r, c in zip(total, CORRECT) if r is not None]
        return sum(terms) / len(terms)
    by_group = []
    for group in sorted(set(GROUPS)):
        rows = [i for i in range(6) if GROUPS[i] == group and total[i] is not None]
        terms = [-torch.sigmoid(total[i] - total[j]).log() for i in rows for j in rows if CORRECT[i] > CORRECT[j]]
        by_group += [sum(terms) / len(terms)] if terms else []
    return sum(by_group) / len(by_group)


@pytest.mark.parametrize("kind", ["ce", "dpo"])
def test_losses_and_gradients(tools, kind):
    """Fractional outcomes, ragged groups, an empty sample: value and gradient are those of the equations; slots outside the mask
    hold NaN and have gradient 0; the order of rows changes nothing."""
    batch, log_probs = drawn(tools)
    mine, theirs = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    loss = ImplicitRewardLoss(0.7, kind)
    got, want = loss_of(batch, loss, mine), references(batch, theirs, kind, 0.7)
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    got.backward()
    want.backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-12, rtol=0)
    assert not mine.grad[~batch.tokens["loss_mask"]].any()
    shuffled = batch.select([5, 2, 3, 0, 1, 4])
    assert float(loss_of(shuffled, loss, shuffled.tokens["log_probs"])) == pytest.approx(want.item(), rel=1e-12)


def test_logits_do_not_saturate(tools):
    """A confident wrong model has a loss of its margin, and a gradient: sigmoid outputs would have given inf or 0."""
    batch = tools.ragged([[1]], [0], [0.0], log_probs=[[0.0]], **{REFERENCE: [[0.0]]})
    log_probs = torch.tensor([math.nan, 2000.0], dtype=torch.float64, requires_grad=True)
    value = loss_of(batch, ImplicitRewardLoss(1.0, "ce"), log_probs)
    value.backward()
    assert float(value.detach()) == 2000
    assert log_probs.grad.tolist() == [0.0, 1.0]


def test_nothing_to_learn_from(tools):
    """No tokens, or for dpo no two outcomes that differ: said before an optimizer would move the model by its momentum."""
    empty = tools.ragged([[0], [0]], [0, 0], [0, 1])
    flat = tools.ragged([[1], [1]], [0, 0], [1, 1])
    assert not ImplicitRewardLoss(0.05, "ce").denominators(empty)[1]
    assert not ImplicitRewardLoss(0.05, "dpo").denominators(empty)[1]
    assert ImplicitRewardLoss(0.05, "ce").denominators(flat)[1]
    assert not ImplicitRewardLoss(0.05, "dpo").denominators(flat)[1]
    assert [x.numel() for x in pairs(torch.zeros(0), torch.zeros(0, dtype=torch.int64))] == [0, 0, 0]


def test_implicit_rewards_cover_every_token(tools):
    """beta times the log-ratio of all response tokens, the last one too (a public port drops it)."""
    batch, log_probs = drawn(tools)
    got = implicit(log_probs, batch, 0.05)
    mask = batch.tokens["loss_mask"]
    torch.testing.assert_close(got[mask], 0.05 * (log_probs - batch.tokens[REFERENCE])[mask], atol=0, rtol=0)
    assert not got[~mask].any()


def test_segments_and_whole(tools):
    """Rewards move to the ends of segments, and of the answer; sums by sample stay, masked tokens take part in nothing."""
    batch = tools.ragged([[1, 1, 0, 1, 1], [1, 1], [0], [1]], [0, 0, 1, 1], [0] * 4,
                         r=[[1, 2, math.nan, 4, 8], [16, 32], [math.nan], [64]])
    rewards = torch.where(batch.tokens["loss_mask"], batch.tokens["r"], 0)
    ends = torch.zeros_like(batch.tokens["loss_mask"])
    assert tools.of_rows(gathered(rewards, batch, ends), batch) == [[0, 0, 0, 0, 15], [0, 48], [0], [64]]
    ends[torch.tensor([2, 7])] = True
    assert tools.of_rows(gathered(rewards, batch, ends), batch) == [[0, 3, 0, 0, 12], [16, 32], [0], [64]]


def test_delimiters(tools):
    """A delimiter over two tokens, one within a token, none, one that is cut off by the sample's end."""
    words = ["", "a", "\n", "b\n\nc", "\n\n", "d"]
    batch = tools.ragged([[1] * 4, [1, 1], [1, 1], [1, 0, 1]], [0] * 4, [0] * 4)
    batch.tokens["ids"] = torch.tensor([4, 1, 2, 2, 5, 0, 3, 5, 0, 1, 2, 4, 2, 4, 2])
    ends = delimited(batch, "\n\n", words.__getitem__)
    assert tools.of_rows(ends.double(), batch) == [[0, 0, 1, 0], [1, 0], [0, 0], [0, 0, 1]]


def test_agreement():
    """Pairs weigh the difference of their outcomes, ties count half; a positive reward says above 1/2."""
    rewards = torch.tensor([0.3, -0.2, 0.3, 1.0, -1.0])
    correct = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0])
    found = agreement(rewards, correct, torch.tensor([0, 0, 0, 1, 1]))
    # pairs of group 0: 1 > 0 right (weight 1), 1 > .5 tie (.5), .5 > 0 right (.5)
    assert found["pair_accuracy"] == pytest.approx((1 + 0.25 + 0.5) / 2)
    assert found["sign_accuracy"] == pytest.approx((1 + 1 + 0.5 + 0 + 1) / 5)
    assert found["reward_mean"] == pytest.approx(0.08)
    assert "pair_accuracy" not in agreement(rewards[3:], correct[3:], torch.tensor([1, 1]))
