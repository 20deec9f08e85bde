"""The KL between policy and reference: estimators from log-probabilities of sampled tokens, and an adaptive coefficient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str, old_log_probs: Tensor | None = None) -> Tensor:
    """KL(policy, reference) of each token, by an estimator (Schulman 2020, "Approximating KL divergence").

    With d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Differentiated on samples of the policy, k2 has
    the gradient of the reverse KL, k3 that of the forward KL, and k1 none. k3_unbiased is k3 times pi / pi_old, as in
    DeepSeek-V3.2 (arXiv 2512.02556): k3's value, and the reverse KL's gradient, also on samples of an older policy
    (`old_log_probs`; default: this one).
    """
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


@dataclass
class KlCoefficient:
    """The KL's weight: fixed, or moved towards a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""

    value: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, sequences: int) -> None:
        """After a step of so many sequences with mean KL `kl` per token."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * sequences / self.horizon
