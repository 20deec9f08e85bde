"""Losses: picklable callables from a micro-batch's outputs to terms, each a local sum with its kind of denominator.

Every loss selects by `loss_mask` before it computes, so nothing outside the mask (NaN included) reaches a value or gradient."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlrun.batch import Batch
from rlrun.workers.protocol import Kind, Term


def aggregate(losses: Tensor, batch: Batch, mode: str, longest: int = 0) -> tuple[Tensor, Kind]:
    """Sum of token losses (of the tokens in `loss_mask`, in order) under an aggregation, and its denominator.

    token_mean: mean over all tokens (DAPO). seq_mean_token_mean: mean over sequences of each one's mean (GRPO).
    seq_mean_token_sum: mean over sequences of each one's sum. seq_mean_constant: that sum over `longest`, the largest number of
    tokens that a completion may have, whatever is in the batch (Dr. GRPO, arXiv 2503.20783)."""
    if mode == "token_mean":
        return losses.sum(), "tokens"
    if mode == "seq_mean_token_sum":
        return losses.sum(), "sequences"
    if mode == "seq_mean_constant":
        return losses.sum() / longest, "sequences"
    if mode == "seq_mean_token_mean":
        lengths = batch.loss_lengths()[batch.sequence_ids[batch.tokens["loss_mask"]]]
        return (losses / lengths).sum(), "sequences"
    raise ValueError(f"unknown loss aggregation {mode!r}")


def ppo_clip(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Token losses and whether each is clipped (PPO, arXiv 1707.06347, equation 7; DAPO's clip-higher: high > low)."""
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def dual_clip(losses: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Losses of at most `bound` times -advantage where that is negative, and whether this cuts (arXiv 1912.09729, equation 5)."""
    limit = -advantages * bound
    cut = (advantages < 0) & (losses > limit)
    return torch.where(cut, limit, losses), cut


def gspo(log_ratio: Tensor, advantages: Tensor, rows: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Clipped losses with one ratio a sequence, exp(mean of its tokens' log-ratios) (GSPO, arXiv 2507.18071).

    In its token form (GSPO-token): the value is the sequence's ratio, the gradient goes through the token's log-probability; it
    is GSPO's own where the advantages of a sequence are equal. `rows` [M]: the sequence of each token."""
    count = int(rows.max()) + 1 if rows.numel() else 0
    sums = log_ratio.detach().new_zeros(count).index_add(0, rows, log_ratio.detach())
    mean = (sums / torch.bincount(rows, minlength=count).clamp(min=1))[rows]
    return ppo_clip(mean + (log_ratio - log_ratio.detach()), advantages, low, high)


def cispo(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-sg(clipped ratio) advantage log pi: every token keeps a gradient (CISPO, MiniMax-M1, arXiv 2506.13585, equation 4).

    Second: whether each ratio is clipped. low = 1: not from below."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantages * log_probs, weight != ratio


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, kind: str, old_log_probs: Tensor | None = None) -> Tensor:
    """KL(policy, reference) of each token, by an estimator (Schulman 2020, "Approximating KL divergence").

    With d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Differentiated on samples of the policy, k2 has
    the gradient of the reverse KL, k3 that of the forward KL, and k1 none. k3_unbiased is k3 times pi / pi_old, as in
    DeepSeek-V3.2 (arXiv 2512.02556): k3's value, and the reverse KL's gradient, also on samples of an older policy
    (`old_log_probs`; default: this one)."""
    d = log_probs - ref_log_probs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return (-d).exp() - 1 + d
    if kind == "k3_unbiased":
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        return (log_probs - old).exp() * ((-d).exp() - 1 + d)
    raise ValueError(f"unknown KL estimator {kind!r}: use k1, k2, k3 or k3_unbiased")


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss by name (`loss`), with a KL to the reference and an entropy bonus.

    Reads `advantages`, `correction_weights` where there is that column, `log_probs` (the old ones; without that column the policy
    is its own old one, ratio 1), `ref_log_probs` where kl_coef > 0; compares with `rollout_log_probs` where `gap_mask` is set."""

    clip_low: float
    clip_high: float
    aggregation: str
    kl_coef: float = 0.0
    kl_estimator: str = "k3_unbiased"
    entropy_coef: float = 0.0
    loss: str = "ppo_clip"
    dual_clip: float | None = None
    longest: int = 0  # rollout.max_new_tokens, for aggregation seq_mean_constant

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        new, advantages = outputs["log_probs"][mask], batch.tokens["advantages"][mask]
        if "correction_weights" in batch.tokens:
            advantages = advantages * batch.tokens["correction_weights"][mask]
        old = batch.tokens["log_probs"][mask] if "log_probs" in batch.tokens else new.detach()
        losses, clipped = self.token_losses(new, old, advantages, batch.sequence_ids[mask])
        terms = {
            "actor/ppo_kl": Term((old - new).sum().detach(), "tokens"),
            "actor/pg_clipfrac": Term(clipped.sum().to(new.dtype), "tokens"),
        }
        if self.dual_clip is not None:
            losses, cut = dual_clip(losses, advantages, self.dual_clip)
            terms["actor/pg_clipfrac_lower"] = Term(cut.sum().to(new.dtype), "tokens")
        terms["actor/pg_loss"] = Term(*self.aggregate(losses, batch), 1.0)
        if self.kl_coef > 0:
            distance = estimate_kl(new, batch.tokens["ref_log_probs"][mask], self.kl_estimator, old)
            terms["actor/kl_loss"] = Term(*self.aggregate(distance, batch), self.kl_coef)
        if "entropy" in outputs:
            entropy = outputs["entropy"][mask]
            terms["actor/entropy"] = Term(entropy.sum().detach(), "tokens")
            if self.entropy_coef > 0:
                terms["actor/entropy_bonus"] = Term(*self.aggregate(entropy, batch), -self.entropy_coef)
        if "gap_mask" in batch.tokens:
            compared = batch.tokens["gap_mask"]
            gap = (outputs["log_probs"].detach()[compared] - batch.tokens["rollout_log_probs"][compared]).abs()
            terms["rollout/gap_mean"] = Term(gap.sum(), "gap")
            if gap.numel():
                terms["rollout/gap_max"] = Term(gap.max(), "max")
        return terms

    def token_losses(self, new: Tensor, old: Tensor, advantages: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of the tokens in `loss_mask`, and whether each is clipped. `rows`: the sequence of each."""
        if self.loss == "ppo_clip":
            return ppo_clip(new - old, advantages, self.clip_low, self.clip_high)
        if self.loss == "gspo":
            return gspo(new - old, advantages, rows, self.clip_low, self.clip_high)
        if self.loss == "cispo":
            return cispo(new, new - old, advantages, self.clip_low, self.clip_high)
        if self.loss == "policy_gradient":  # Williams 1992
            return -advantages * new, torch.zeros_like(new, dtype=torch.bool)
        raise ValueError(f"unknown policy loss {self.loss!r}")

    def aggregate(self, losses: Tensor, batch: Batch) -> tuple[Tensor, Kind]:
        return aggregate(losses, batch, self.aggregation, self.longest)


@dataclass(frozen=True)
class ValueLoss:
    """Clipped squared error of the values against `returns` (arXiv 1707.06347 and its reference code), halved.

    Reads `returns` and `values` (the old ones)."""

    clip: float

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        new, old, returns = outputs["values"][mask], batch.tokens["values"][mask], batch.tokens["returns"][mask]
        near = new.clamp(old - self.clip, old + self.clip)  # exactly `new` inside, so that rounding is not counted as clipped
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
