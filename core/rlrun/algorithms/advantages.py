"""Advantages: pure functions on ragged tensors. Groups go by id, never by row position."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrun.batch import Batch


def grpo(rewards: Tensor, groups: Tensor, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """[S] rewards less their group's mean, over its standard deviation (unbiased) where `scale`.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2; without scale as in Dr. GRPO (arXiv 2503.20783), equation 1. A group of
    one, and a group of equal rewards, has advantage 0. Computed in float64, so that a group's rounding noise is never scaled up.
    """
    index, counts = _group_index(groups)
    r = rewards.double()
    centred = r - _group_sum(r, index, counts)[index] / counts[index]
    centred[_flat(r, index, counts)[index]] = 0
    if scale:
        std = (_group_sum(centred.square(), index, counts) / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (std[index] + eps)
    return centred.to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """[S] rewards less the mean of the group's other rewards (arXiv 2402.14740, section 3.2). A group of one has 0."""
    index, counts = _group_index(groups)
    r = rewards.double()
    others = (_group_sum(r, index, counts)[index] - r) / (counts - 1).clamp(min=1)[index]
    advantages = r - others
    advantages[_flat(r, index, counts)[index]] = 0
    return advantages.to(rewards.dtype)


def gae(rewards: Tensor, values: Tensor, batch: Batch, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16): advantages and returns [T], 0 outside `loss_mask`.

    Steps are the tokens of `loss_mask`; what lies between them (another speaker's tokens) does not end the episode. The value
    after the last one is 0.
    """
    mask = batch.tokens["loss_mask"]
    r, v = rewards[mask], values[mask]
    lengths = batch.loss_lengths()
    ends = lengths.cumsum(0)
    advantages = torch.zeros_like(v)
    following, next_value = v.new_zeros(len(batch)), v.new_zeros(len(batch))
    for back in range(1, _longest(lengths) + 1):
        rows = lengths >= back
        at = (ends - back)[rows]
        delta = r[at] + gamma * next_value[rows] - v[at]
        following[rows] = delta + gamma * lam * following[rows]
        next_value[rows] = v[at]
        advantages[at] = following[rows]
    return _spread(advantages, mask), _spread(advantages + v, mask)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """[T] with mean 0 and standard deviation 1 over `mask`, 0 elsewhere. Equal advantages become 0."""
    chosen = advantages[mask].double()
    if chosen.numel() < 2 or bool(chosen.max() == chosen.min()):
        return torch.zeros_like(advantages)
    return _spread(((chosen - chosen.mean()) / chosen.std()).to(advantages.dtype), mask)


def to_tokens(per_sequence: Tensor, batch: Batch) -> Tensor:
    """[T] each sequence's number on every token of its `loss_mask`, 0 elsewhere."""
    mask = batch.tokens["loss_mask"]
    return _spread(per_sequence[batch.sequence_ids[mask]], mask)


def at_last_token(per_sequence: Tensor, batch: Batch) -> Tensor:
    """[T] each sequence's number on the last token of its `loss_mask`, 0 elsewhere. Without such a token it is nowhere."""
    mask = batch.tokens["loss_mask"]
    lengths = batch.loss_lengths()
    chosen = per_sequence.new_zeros(int(lengths.sum()))
    some = lengths > 0
    chosen[(lengths.cumsum(0) - 1)[some]] = per_sequence[some]
    return _spread(chosen, mask)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _spread(chosen: Tensor, mask: Tensor) -> Tensor:
    return chosen.new_zeros(mask.shape[0]).masked_scatter(mask, chosen)


def _group_index(groups: Tensor) -> tuple[Tensor, Tensor]:
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    return index, counts


def _group_sum(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(counts.shape[0]).index_add(0, index, values)


def _flat(rewards: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """[groups] whether all rewards of a group are equal, by comparison: a rounded deviation of 1e-8 would pass for a signal."""
    low = rewards.new_full(counts.shape, torch.inf).scatter_reduce(0, index, rewards, "amin")
    high = rewards.new_full(counts.shape, -torch.inf).scatter_reduce(0, index, rewards, "amax")
    return low == high
