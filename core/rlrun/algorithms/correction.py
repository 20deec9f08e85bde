"""Off-policy correction: tokens were drawn by an engine whose probabilities are not quite the trainer's, or from top_p, top_k.

Weights are pi_old / mu, trainer's old policy over engine. After Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training" (truncated importance sampling), and, for sequences, Liu et al. 2025, "When speed kills stability"."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms.advantages import to_tokens
from rlrun.batch import Batch
from rlrun.metrics import Value


class Correction(NamedTuple):
    """What a correction makes of a batch."""

    weights: Tensor  # [T] factor of each token's advantage; 0 outside `loss_mask`
    rejected: Tensor  # [S] samples not to be trained on
    metrics: dict[str, Value]


def correct(batch: Batch, kind: str, cap: float) -> Correction:
    """Compare `log_probs` with `rollout_log_probs`, by `kind`:

    token_tis: each token weighs min(its ratio, cap). sequence_tis: each sequence weighs min(product of its ratios, cap).
    sequence_reject: sequences whose product is outside [1 / cap, cap] are rejected, the others weigh 1.

    Metrics: mean of the weights used, effective sample size (sum w)^2 / (n sum w^2) of the ratios before any cap, share of
    samples rejected. Samples without a loss token count nowhere."""
    mask, some = batch.tokens["loss_mask"], batch.loss_lengths() > 0
    d = batch.tokens["log_probs"].double() - batch.tokens["rollout_log_probs"].double()
    sums, limit = batch.sums(d), math.log(cap)
    rejected = torch.zeros_like(some)
    if kind == "token_tis":
        ratios, weights = d[mask], torch.where(mask, d, 0).clamp(max=limit).exp() * mask
    else:
        ratios, per_sequence = sums[some], sums.clamp(max=limit).exp()
        if kind == "sequence_reject":
            rejected = some & ~(sums.abs() <= limit)  # also where it is not a number
            per_sequence = (~rejected).double()
        weights = to_tokens(per_sequence, batch)
    used = weights[mask] if kind == "token_tis" else per_sequence[some]
    metrics = {
        "correction/weight": Value(float(used.sum()), used.numel()),
        "correction/rejected": Value(float(rejected.sum()), float(some.sum())),
    }
    if ratios.numel():
        relative = (ratios - ratios.max()).exp()
        metrics["correction/effective_sample_size"] = Value(
            float(relative.sum().square() / relative.square().sum()) / ratios.numel(), 1.0)
    return Correction(weights.to(batch.tokens["log_probs"].dtype), rejected, metrics)
