"""Advantages from process rewards: pure functions. Groups go by id, samples without a loss token count in no baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrun.batch import Batch


def leave_one_out(rewards: Tensor, batch: Batch, scaled: bool = False) -> Tensor:
    """[T] float64 process rewards r_t less the mean over the group's other samples of their token-averaged rewards m_j.

    The bracket of arXiv 2502.01456, equation 5. `scaled`: as the paper's code has it, (n r_t - sum of all m_j) / (n - 1), which
    is that plus (r_t - m_i) / (n - 1). 0 where a group has one sample.
    """
    r, means, index, n = _by_group(rewards, batch)
    total, others = _sum(means, index), (n[index] - 1).clamp(min=1)
    rows = batch.sequence_ids
    if scaled:
        centred = r * (n[index] / others)[rows] - (total[index] / others)[rows]
    else:
        centred = r - ((total[index] - means) / others)[rows]
    return torch.where(batch.tokens["loss_mask"] & (n[index] > 1)[rows], centred, 0)


def normalised(rewards: Tensor, batch: Batch, scale: bool, floor: float) -> Tensor:
    """[T] float64 process rewards less the mean of their group's token-averaged rewards, over these averages' deviation.

    The bracket of arXiv 2502.01456, equation 7. The deviation (unbiased) counts as at least `floor`, so that a model that says
    nothing yet is not blown up. Not divided where `scale` is off; 0 where a group has one sample.
    """
    r, means, index, n = _by_group(rewards, batch)
    some, rows = batch.loss_lengths() > 0, batch.sequence_ids
    mean = _sum(means, index) / n.clamp(min=1)
    centred = r - mean[index][rows]
    if scale:
        square = torch.where(some, (means - mean[index]).square(), 0)
        std = (_sum(square, index) / (n - 1).clamp(min=1)).sqrt().clamp(min=floor)
        centred = centred / std[index][rows]
    return torch.where(batch.tokens["loss_mask"] & (n[index] > 1)[rows], centred, 0)


def whiten(advantages: Tensor, mask: Tensor, floor: float) -> Tensor:
    """[T] less the mean over `mask`, over the standard deviation (unbiased) or `floor`, whichever is larger; 0 elsewhere."""
    chosen = advantages[mask]
    if chosen.numel() < 2:
        return torch.zeros_like(advantages)
    return torch.zeros_like(advantages).masked_scatter(mask, (chosen - chosen.mean()) / chosen.std().clamp(min=floor))


def _by_group(rewards: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T] rewards and [S] token averages in float64, [S] group index, [G] samples with a loss token."""
    lengths = batch.loss_lengths()
    r = torch.where(batch.tokens["loss_mask"], rewards.double(), 0)
    _, index = batch.sequences["group"].unique(return_inverse=True)
    return r, batch.sums(r) / lengths.clamp(min=1), index, _sum((lengths > 0).double(), index)


def _sum(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(int(index.max()) + 1).index_add(0, index, values)
