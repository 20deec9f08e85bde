"""Advantages: pure functions on ragged tensors. Groups go by id, never by row position.

Group estimators give 0 to a group of one and to a group of equal rewards. A deviation that is only rounding noise is never
divided by: equality is found by comparison, and computed in float64."""

from math import comb

import torch
from torch import Tensor

from rlrun.batch import Batch

_NOISE = 1e-6  # A standard deviation of less than this share of the numbers themselves is their rounding


def grpo(rewards: Tensor, groups: Tensor, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """[S] rewards less their group's mean, over its standard deviation (unbiased) where `scale`.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2; without scale as in Dr. GRPO (arXiv 2503.20783), equation 1, and as the
    first half of REINFORCE++-baseline (arXiv 2501.03262)."""
    index, counts = _group_index(groups)
    r = rewards.double()
    centred = _less(r, _group_sum(r, index, counts)[index] / counts[index], index)
    if scale:
        std = (_group_sum(centred.square(), index, counts) / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (std[index] + eps)
    return centred.to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """[S] rewards less the mean of the group's other rewards (arXiv 2402.14740, section 3.2)."""
    index, counts = _group_index(groups)
    r = rewards.double()
    others = (_group_sum(r, index, counts)[index] - r) / (counts - 1).clamp(min=1)[index]
    return _less(r, others, index).to(rewards.dtype)


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """[S] rewards less their group's mean weighted by completion lengths [S], sum(l r) / sum(l).

    The baseline of least variance where a gradient's square grows with length (OPO, arXiv 2505.23585)."""
    index, counts = _group_index(groups)
    r, weights = rewards.double(), lengths.double()
    total = _group_sum(weights, index, counts).clamp(min=1)
    return _less(r, (_group_sum(weights * r, index, counts) / total)[index], index).to(rewards.dtype)


def pass_at_k(rewards: Tensor, groups: Tensor, k: int) -> Tensor:
    """[S] advantages where the best of k completions is what is rewarded, over all sets of k of a group's n at once.

    Pass@k training, analytical form (arXiv 2508.10751): with R the best reward in a set of k, a completion's advantage is
    (mean of R over the sets that hold it - mean of R over all sets) / standard deviation of R over all sets. For rewards of 0
    and 1 this is the paper's closed form; here rewards may be any numbers. Groups of fewer than k count as one set: 0."""
    index, counts = _group_index(groups)
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for group, n in enumerate(counts.tolist()):
        if n > k:
            rows = (index == group).nonzero()[:, 0]
            advantages[rows] = _best_of(rewards[rows].double(), k)
    return advantages.to(rewards.dtype)


def _best_of(rewards: Tensor, k: int) -> Tensor:
    """`pass_at_k` of one group of more than k. In order of reward, item i (from 0) is the best of C(i, k-1) sets."""
    n, (r, order) = len(rewards), (rewards - rewards.min()).sort()
    weights = torch.tensor([comb(i, k - 1) / comb(n, k) for i in range(n)], dtype=r.dtype)
    mean = (weights * r).sum()
    std = (weights * (r - mean).square()).sum().sqrt()
    if std <= _NOISE * r[-1]:
        return torch.zeros_like(r)
    i, other = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    rank = other - (other > i).long()  # of each other completion, without completion i
    chance = torch.tensor([comb(j, k - 2) / comb(n - 1, k - 1) if k > 1 else 0.0 for j in range(n)], dtype=r.dtype)
    best = torch.where(i == other, 0, chance[rank] * torch.maximum(r[i], r[other])).sum(1) if k > 1 else r
    return torch.empty_like(r).scatter(0, order, (best - mean) / std)


def gae(rewards: Tensor, values: Tensor, batch: Batch, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16): advantages and returns [T], 0 outside `loss_mask`.

    Steps are the tokens of `loss_mask`; what lies between them (another speaker's tokens) does not end the episode. The value
    after the last one is 0."""
    mask = batch.tokens["loss_mask"]
    r, v = rewards[mask], values[mask]
    lengths = batch.loss_lengths()
    ends = lengths.cumsum(0)
    advantages = torch.zeros_like(v)
    following, next_value = v.new_zeros(len(batch)), v.new_zeros(len(batch))
    for back in range(1, max(lengths.tolist(), default=0) + 1):
        rows = lengths >= back
        at = (ends - back)[rows]
        delta = r[at] + gamma * next_value[rows] - v[at]
        following[rows] = delta + gamma * lam * following[rows]
        next_value[rows] = v[at]
        advantages[at] = following[rows]
    return _spread(advantages, mask), _spread(advantages + v, mask)


def returns_to_go(rewards: Tensor, batch: Batch, gamma: float = 1.0) -> Tensor:
    """[T] discounted sum of the rewards from each token on, 0 outside `loss_mask`.

    With a reward at the end and a KL at every token: REINFORCE++ (arXiv 2501.03262) before its normalisation by `whiten`;
    less the reward of the prompt's greedy completion: ReMax (arXiv 2310.10505)."""
    return gae(rewards, torch.zeros_like(rewards), batch, gamma, 1.0)[0]


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """[T] with mean 0 and standard deviation 1 over `mask`, 0 elsewhere. Where all are equal, to rounding, they become 0."""
    chosen = advantages[mask].double()
    if chosen.numel() < 2 or bool(chosen.std() <= _NOISE * chosen.abs().max()):
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


def _spread(chosen: Tensor, mask: Tensor) -> Tensor:
    return chosen.new_zeros(mask.shape[0]).masked_scatter(mask, chosen)


def _group_index(groups: Tensor) -> tuple[Tensor, Tensor]:
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    return index, counts


def _group_sum(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(counts.shape[0]).index_add(0, index, values)


def sizes(groups: Tensor) -> Tensor:
    """[S] how many samples each one's group has."""
    index, counts = _group_index(groups)
    return counts[index]


def flat(rewards: Tensor, groups: Tensor) -> Tensor:
    """[S] whether all rewards of a sample's group are equal, by comparison: a rounded deviation of 1e-8 is no signal."""
    index, counts = _group_index(groups)
    low = rewards.new_full(counts.shape, torch.inf).scatter_reduce(0, index, rewards, "amin")
    high = rewards.new_full(counts.shape, -torch.inf).scatter_reduce(0, index, rewards, "amax")
    return (low == high)[index]


def _less(rewards: Tensor, baseline: Tensor, groups: Tensor) -> Tensor:
    """Rewards less a baseline, exactly 0 in groups of equal rewards, and of one."""
    return torch.where(flat(rewards, groups), 0, rewards - baseline)
