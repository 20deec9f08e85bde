"""GRPO and RLOO: critic-free, advantages from the other samples of the same prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlrun.algorithms import advantages, kl
from rlrun.algorithms.base import Algorithm
from rlrun.algorithms.losses import PolicyLoss
from rlrun.metrics import Value
from rlrun.workers.protocol import RoleRequest

if TYPE_CHECKING:
    from rlrun.batch import Batch
    from rlrun.config.schema import Config, StageConfig
    from rlrun.workers.protocol import Loss


class PolicyAlgorithm(Algorithm):
    """What the policy-gradient algorithms share: the reference model and its KL, and the clipped policy loss."""

    def __init__(self, config: Config, stage: StageConfig) -> None:
        super().__init__(config, stage)
        o = self.options
        self.kl_coef = kl.KlCoefficient(o.kl_coef, o.kl_target, o.kl_horizon)
        self.kl_in_reward = o.kl_coef > 0 and o.kl_in == "reward"
        self.needs_old_log_probs = self.kl_in_reward

    def roles(self) -> dict[str, RoleRequest]:
        if self.options.kl_coef == 0:
            return {}
        ref = self.config.ref
        return {"ref": RoleRequest(trainable=False, path=ref.path, dtype=ref.dtype or self.config.model.dtype)}

    def wants(self) -> dict[str, frozenset[str]]:
        return {"actor": frozenset({"log_probs", "entropy"})}

    def token_rewards(self, batch: Batch) -> tuple[Tensor, dict[str, Value]]:
        """[T] the sequences' rewards on their last tokens, less the KL of each token where it goes into the reward."""
        rewards = advantages.at_last_token(batch.sequences["reward"], batch)
        if not self.kl_in_reward:
            return rewards, {}
        mask = batch.tokens["loss_mask"]
        distance = kl.estimate(batch.tokens["log_probs"], batch.tokens["ref_log_probs"], self.options.kl_estimator)
        distance = torch.where(mask, distance, 0)
        mean = Value(float(distance.sum()), float(mask.sum()))
        used = self.kl_coef.value
        if mean.count:
            self.kl_coef.update(mean.result, len(batch))
        return rewards - used * distance, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": Value(used)}

    def losses(self, step: int) -> Mapping[str, Loss]:
        o = self.options
        in_loss = self.kl_coef.value if o.kl_in == "loss" else 0.0
        return {"actor": PolicyLoss(o.clip_low, o.clip_high, o.loss_aggregation, in_loss, o.kl_estimator, o.entropy_coef)}

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_coef.value = state["kl_coef"]


class Grpo(PolicyAlgorithm):
    """Group-relative policy optimization (DeepSeekMath, arXiv 2402.03300)."""

    def baseline(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """[S] advantages from rewards [S] and group ids [S]."""
        return advantages.grpo(rewards, groups, self.options.scale_rewards)

    def advantages(self, batch: Batch) -> dict[str, Value]:
        rewards, metrics = self.token_rewards(batch)
        batch.tokens["token_rewards"] = rewards
        totals = batch.sums(rewards) if self.kl_in_reward else batch.sequences["reward"]
        batch.tokens["advantages"] = advantages.to_tokens(self.baseline(totals, batch.sequences["group"]), batch)
        return metrics


class Rloo(Grpo):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

    def baseline(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return advantages.rloo(rewards, groups)
