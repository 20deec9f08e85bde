"""DPO against its paper, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlrun.algorithms.dpo import Dpo, DpoLoss
from rlrun.batch import Batch
from rlrun.config.schema import AlgorithmConfig, Config, StageConfig
from rlrun.data.sample import Sample

BETA = 0.3
LENGTHS = [(3, 5), (4, 2), (2, 6), (3, 1), (5, 3), (4, 4)]
"""Prompt and completion tokens of 6 answers: rows 0 and 3, 1 and 2, 5 and 4 are pairs, the preferred one named first."""


def make_batch() -> Batch:
    rows = [{"ids": range(p + c), "loss_mask": [False] * p + [True] * c} for p, c in LENGTHS]
    batch = Batch.from_sequences(rows, {
        "pair": torch.tensor([40, 7, 7, 40, 9, 9]), "preference": torch.tensor([0, 0, 1, 1, 1, 0]),
        "group": torch.tensor([40, 7, 7, 40, 9, 9])})
    generator = torch.Generator().manual_seed(0)
    batch.tokens["ref_log_probs"] = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64) - 2
    return batch


def equation_7(log_probs, batch):
    """-E log sigmoid(beta log(pi(y_w) / ref(y_w)) - beta log(pi(y_l) / ref(y_l))), written out over rows."""
    ratios = [(a - b)[mask].sum() for a, b, mask in zip(
        log_probs.split(batch.lengths.tolist()), batch.tokens["ref_log_probs"].split(batch.lengths.tolist()),
        batch.tokens["loss_mask"].split(batch.lengths.tolist()))]
    margins = torch.stack([BETA * ratios[w] - BETA * ratios[lost] for w, lost in ((0, 3), (1, 2), (5, 4))])
    return -torch.log(1 / (1 + torch.exp(-margins))).mean(), margins


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf"), 1e6])
def test_value_and_gradient(fill):
    """Case 89 too: the mean over pairs, whatever their order in the batch, and nothing outside the mask counts."""
    batch = make_batch()
    given = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 2
    expected_input = given.clone().requires_grad_()
    expected, margins = equation_7(expected_input, batch)
    expected.backward()
    outside = ~batch.tokens["loss_mask"]
    given[outside] = batch.tokens["ref_log_probs"][outside] = fill
    given.requires_grad_()
    terms = DpoLoss(BETA)({"log_probs": given}, batch)
    pairs = batch.denominators()["groups"]
    assert pairs == 3
    loss = terms["dpo/loss"].sum / pairs
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(given.grad, torch.where(outside, 0, expected_input.grad), rtol=1e-12, atol=1e-15)
    assert terms["dpo/margin"].sum.item() == pytest.approx(margins.sum().item(), rel=1e-12)
    assert terms["dpo/accuracy"].sum.item() == (margins > 0).sum().item() in (1, 2)
    gap = terms["dpo/chosen_reward"].sum - terms["dpo/rejected_reward"].sum
    assert gap.item() == pytest.approx(margins.sum().item(), rel=1e-12)


def test_a_far_margin_is_finite():
    """log sigmoid does not overflow, and the gradient of a pair that is all wrong is -beta, not NaN."""
    batch = make_batch()
    given = batch.tokens["ref_log_probs"] + torch.where(batch.sequences["preference"] == 0, -1e5, 1e5)[batch.sequence_ids]
    given.requires_grad_()
    DpoLoss(BETA)({"log_probs": given}, batch)["dpo/loss"].sum.backward()
    assert given.grad.abs().max().item() == pytest.approx(BETA)


def test_half_a_pair_is_a_bug():
    with pytest.raises(AssertionError, match="pair"):
        DpoLoss(BETA)({"log_probs": make_batch().select([0, 1, 2]).tokens["ref_log_probs"]}, make_batch().select([0, 1, 2]))


def test_completions():
    """Preferred first; a row without a rejected answer is named."""
    algorithm = Dpo(Config(), StageConfig(AlgorithmConfig(name="dpo")))
    sample = Sample("prefs/3", "q", (5,), "good", "prefs", {"rejected": "bad", "other": 1})
    assert algorithm.completions(sample) == ["good", "bad"]
    with pytest.raises(ValueError, match=r"no column 'rejected'.*there is other"):
        algorithm.completions(replace(sample, extra={"other": 1}))
