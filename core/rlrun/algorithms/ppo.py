"""PPO with a critic: GAE advantages, clipped policy and value losses (arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlrun.algorithms import advantages
from rlrun.algorithms.grpo import PolicyAlgorithm
from rlrun.algorithms.losses import ValueLoss
from rlrun.metrics import Value
from rlrun.workers.protocol import RoleRequest

if TYPE_CHECKING:
    from rlrun.batch import Batch
    from rlrun.workers.protocol import Loss


class Ppo(PolicyAlgorithm):
    """PPO: the critic trains in every step, the actor from step `critic_warmup_steps` on."""

    def roles(self) -> dict[str, RoleRequest]:
        critic = self.config.critic
        request = RoleRequest(True, critic.path, self.config.model.dtype, head="value", optim=critic.optim)
        return {**super().roles(), "critic": request}

    def wants(self) -> dict[str, frozenset[str]]:
        return {**super().wants(), "critic": frozenset({"values"})}

    def advantages(self, batch: Batch) -> dict[str, Value]:
        o = self.options
        rewards, metrics = self.token_rewards(batch)
        batch.tokens["token_rewards"] = rewards
        raw, returns = advantages.gae(rewards, batch.tokens["values"], batch, o.gamma, o.lam)
        batch.tokens["returns"] = returns
        batch.tokens["advantages"] = advantages.whiten(raw, batch.tokens["loss_mask"])
        return metrics

    def losses(self, step: int) -> Mapping[str, Loss]:
        critic: dict[str, Loss] = {"critic": ValueLoss(self.options.value_clip)}
        return critic if step < self.options.critic_warmup_steps else {**critic, **super().losses(step)}
