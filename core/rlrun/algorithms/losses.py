"""Losses: picklable callables from a micro-batch's outputs to terms, each a local sum with its kind of denominator.

Every loss selects by `loss_mask` before it computes, so nothing outside the mask (NaN included) reaches a value or gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlrun.algorithms import kl
from rlrun.batch import Batch
from rlrun.workers.protocol import Kind, Term


def aggregate(losses: Tensor, batch: Batch, mode: str) -> tuple[Tensor, Kind]:
    """Sum of token losses (of the tokens in `loss_mask`, in order) under an aggregation, and its denominator.

    token_mean: mean over all tokens. seq_mean_token_mean: mean over sequences of each one's mean. seq_mean_token_sum: mean over
    sequences of each one's sum.
    """
    if mode == "token_mean":
        return losses.sum(), "tokens"
    if mode == "seq_mean_token_sum":
        return losses.sum(), "sequences"
    if mode == "seq_mean_token_mean":
        lengths = batch.loss_lengths()[batch.sequence_ids[batch.tokens["loss_mask"]]]
        return (losses / lengths).sum(), "sequences"
    raise ValueError(f"unknown loss aggregation {mode!r}")


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped policy loss (PPO, arXiv 1707.06347, equation 7), with a KL to the reference and an entropy bonus.

    Reads `advantages`, `log_probs` (the old ones; without that column the policy is its own old one, ratio 1),
    `ref_log_probs` where kl_coef > 0, and compares with `rollout_log_probs` where `gap_mask` is set.
    """

    clip_low: float
    clip_high: float
    aggregation: str
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        new = outputs["log_probs"][mask]
        advantages = batch.tokens["advantages"][mask]
        old = batch.tokens["log_probs"][mask] if "log_probs" in batch.tokens else new.detach()
        ratio = (new - old).exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        terms = {
            "actor/pg_loss": Term(*aggregate(torch.maximum(unclipped, clipped), batch, self.aggregation), 1.0),
            "actor/ppo_kl": Term((old - new).sum().detach(), "tokens"),
            "actor/pg_clipfrac": Term((clipped > unclipped).sum().to(new.dtype), "tokens"),
        }
        if self.kl_coef > 0:
            distance = kl.estimate(new, batch.tokens["ref_log_probs"][mask], self.kl_estimator)
            terms["actor/kl_loss"] = Term(*aggregate(distance, batch, self.aggregation), self.kl_coef)
        if "entropy" in outputs:
            entropy = outputs["entropy"][mask]
            terms["actor/entropy"] = Term(*aggregate(entropy, batch, self.aggregation), -self.entropy_coef)
        if "gap_mask" in batch.tokens:
            compared = batch.tokens["gap_mask"]
            gap = (outputs["log_probs"].detach() - batch.tokens["rollout_log_probs"])[compared].abs()
            terms["rollout/gap_mean"] = Term(gap.sum(), "gap")
            if gap.numel():
                terms["rollout/gap_max"] = Term(gap.max(), "max")
        return terms


@dataclass(frozen=True)
class ValueLoss:
    """Clipped squared error of the values against `returns` (arXiv 1707.06347 and its reference code), halved.

    Reads `returns` and `values` (the old ones).
    """

    clip: float

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        new, old, returns = outputs["values"][mask], batch.tokens["values"][mask], batch.tokens["returns"][mask]
        near = old + (new - old).clamp(-self.clip, self.clip)
        error, clipped = (new - returns).square(), (near - returns).square()
        return {
            "critic/vf_loss": Term(torch.maximum(error, clipped).sum() / 2, "tokens", 1.0),
            "critic/vf_clipfrac": Term((clipped > error).sum().to(new.dtype), "tokens"),
            "critic/vpred_mean": Term(new.sum().detach(), "tokens"),
        }


@dataclass(frozen=True)
class SftLoss:
    """Mean negative log-likelihood of the tokens in `loss_mask`, by the model's own distribution."""

    aggregation: str

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        losses = -outputs["log_probs"][batch.tokens["loss_mask"]]
        return {"sft/loss": Term(*aggregate(losses, batch, self.aggregation), 1.0)}
