"""GRPO whose rewards lose a penalty that grows with the completion's length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlrun.algorithms.losses import PolicyLoss
from rlrun.algorithms.policy_gradient import PolicyAlgorithm
from rlrun.batch import Batch
from rlrun.metrics import Value
from rlrun.workers.protocol import Loss, Term
from rlrun_brevity import BrevityConfig


class Brevity(PolicyAlgorithm):
    """Runs on the driver: it changes the rewards that advantages are made of."""

    def advantages(self, batch: Batch) -> dict[str, Value]:
        share = batch.loss_lengths() / self.config.rollout.max_new_tokens
        batch.sequences["reward"] = batch.sequences["reward"] - self.config.section("brevity", BrevityConfig).penalty * share
        return {**super().advantages(batch), "brevity/share": Value(float(share.sum()), len(batch))}

    def losses(self, step: int) -> Mapping[str, Loss]:
        return {role: BrevityLoss(**vars(loss)) for role, loss in super().losses(step).items()}


@dataclass(frozen=True)
class BrevityLoss(PolicyLoss):
    """Runs in the ranks: the policy loss, and how probable the chosen tokens are."""

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        chosen = outputs["log_probs"][batch.tokens["loss_mask"]].detach().exp()
        return {**super().__call__(outputs, batch), "brevity/probability": Term(chosen.sum(), "tokens")}
