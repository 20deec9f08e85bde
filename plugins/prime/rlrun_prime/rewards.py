"""Implicit process rewards, where they stand, what the reward model is trained on, and how well it agrees with outcomes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from rlrun.batch import Batch
from rlrun.workers.protocol import Term

REFERENCE = "prm_ref_log_probs"
"""Per-token column: the reward model's reference."""
COLUMNS = {"before": "process_reward_before", "after": "process_reward_after"}
"""Per-sequence columns: whole rewards of the model before and after a step's updates."""


def implicit(log_probs: Tensor, batch: Batch, beta: float) -> Tensor:
    """[T] beta * (log pi_phi - log pi_ref) of every token in `loss_mask`, 0 elsewhere (arXiv 2502.01456, equation 3)."""
    return torch.where(batch.tokens["loss_mask"], beta * (log_probs - batch.tokens[REFERENCE]), 0)


def gathered(rewards: Tensor, batch: Batch, ends: Tensor) -> Tensor:
    """[T] rewards summed up from each segment onto its last token, the others 0.

    Segments end where `ends` [T] is set, and with the last token of `loss_mask`.
    """
    mask, lengths = batch.tokens["loss_mask"], batch.loss_lengths()
    stops = ends[mask].clone()
    stops[(lengths.cumsum(0) - 1)[lengths > 0]] = True
    segment = stops.cumsum(0) - stops.long()
    sums = rewards.new_zeros(int(stops.sum())).index_add(0, segment, rewards[mask])
    return torch.zeros_like(rewards).masked_scatter(mask, rewards.new_zeros(len(stops)).masked_scatter(stops, sums))


def delimited(batch: Batch, delimiter: str, decode: Callable[[int], str]) -> Tensor:
    """[T] whether a token of `loss_mask` holds the last character of a delimiter in its sequence's text."""
    mask = batch.tokens["loss_mask"]
    ends, ids, rows = torch.zeros_like(mask), batch.tokens["ids"].tolist(), batch.sequence_ids
    for row in range(len(batch)):
        positions = (mask & (rows == row)).nonzero()[:, 0].tolist()
        texts = [decode(ids[t]) for t in positions]
        text, reach = "".join(texts), list(accumulate(map(len, texts)))
        at = text.find(delimiter)
        while at >= 0:
            ends[positions[bisect_left(reach, at + len(delimiter))]] = True
            at = text.find(delimiter, at + len(delimiter))
    return ends


def pairs(correct: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of a group's samples with unequal outcomes: rows of the better ones, of the worse ones, and the group's number
    of pairs, [P] each."""
    better, worse, counts = [], [], []
    for group in groups.unique():
        rows = (groups == group).nonzero()[:, 0]
        i, j = (correct[rows][:, None] > correct[rows][None, :]).nonzero(as_tuple=True)
        better.append(rows[i])
        worse.append(rows[j])
        counts.append(torch.full_like(i, len(i)))
    empty = [groups.new_zeros(0, dtype=torch.int64)]
    return torch.cat(better or empty), torch.cat(worse or empty), torch.cat(counts or empty)


@dataclass(frozen=True)
class ImplicitRewardLoss:
    """What trains the reward model by outcomes `correct`, from 0 to 1, of samples that have any loss token.

    With R = the sum of a sample's process rewards: ce, the cross-entropy of sigmoid(R) and the outcome, mean over samples (arXiv
    2502.01456, algorithm 1); dpo, -log sigmoid(R of the better - R of the worse), mean over a group's pairs of unequal
    outcomes, then over groups that have any. On logits: nothing saturates. For dpo groups must be whole.
    """

    beta: float
    kind: str

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        ratios = outputs["log_probs"][mask] - batch.tokens[REFERENCE][mask]
        rows = batch.sequence_ids[mask]
        rewards = self.beta * ratios.new_zeros(len(batch)).index_add(0, rows, ratios)
        some = batch.loss_lengths() > 0
        rewards, correct = rewards[some], batch.sequences["correct"][some].to(rewards.dtype)
        if self.kind == "ce":
            return {"prime/loss": Term(binary_cross_entropy_with_logits(rewards, correct, reduction="sum"), "sequences", 1.0)}
        better, worse, counts = pairs(correct, batch.sequences["group"][some])
        return {"prime/loss": Term((-logsigmoid(rewards[better] - rewards[worse]) / counts).sum(), "groups", 1.0)}

    def denominators(self, batch: Batch) -> tuple[dict[str, float], bool]:
        """Counts of a whole mini-batch, and whether there is anything in it to learn from."""
        counts, some = batch.denominators(), batch.loss_lengths() > 0
        if self.kind == "ce":
            return counts, counts["sequences"] > 0
        groups = batch.sequences["group"][some]
        counts["groups"] = float(groups[pairs(batch.sequences["correct"][some], groups)[0]].unique().numel())
        return counts, counts["groups"] > 0


def agreement(rewards: Tensor, correct: Tensor, groups: Tensor) -> dict[str, float]:
    """How a step's whole rewards [S] agree with outcomes [S], from 0 to 1; rewards that say nothing count half.

    pair_accuracy: share of a group's pairs of unequal outcomes that are in the right order, each weighing the difference of its
    outcomes; sign_accuracy: share of samples where the reward is positive just where the outcome is above 1/2.
    """
    rewards, correct = rewards.double(), correct.double()
    better, worse, _ = pairs(correct, groups)
    weights = correct[better] - correct[worse]
    found = {"reward_mean": float(rewards.mean()), "sign_accuracy": float(_right(rewards * (correct - 0.5).sign()).mean())}
    if len(rewards) > 1:
        found["reward_std"] = float(rewards.std())
    if len(better):
        found["pair_accuracy"] = float((weights * _right(rewards[better] - rewards[worse])).sum() / weights.sum())
    return found


def _right(margins: Tensor) -> Tensor:
    return (margins.sign() + 1) / 2
