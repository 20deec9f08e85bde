"""Every online algorithm of core: one class, whose parts the configuration chooses; `presets.py` names the known combinations."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlrun.algorithms import advantages
from rlrun.algorithms.base import Algorithm
from rlrun.algorithms.coefficients import EntropyCoefficient, KlCoefficient
from rlrun.algorithms.correction import correct
from rlrun.algorithms.losses import PolicyLoss, ValueLoss, estimate_kl
from rlrun.batch import Batch
from rlrun.config.schema import Config, StageConfig
from rlrun.metrics import Value
from rlrun.workers.protocol import Loss, RoleRequest

log = logging.getLogger(__name__)


class PolicyAlgorithm(Algorithm):
    """Policy gradient by the fields `advantage` and `loss` of the stage's options; with advantage gae there is a critic.

    A subclass may override `estimate` (advantages), or change rewards before `advantages`, or replace the actor's loss."""

    def __init__(self, config: Config, stage: StageConfig) -> None:
        super().__init__(config, stage)
        o = self.options
        self.kl_coef = KlCoefficient(o.kl_coef, o.kl_target, o.kl_horizon)
        self.entropy_coef = EntropyCoefficient(o.entropy_coef, o.entropy_target)
        self.kl_in_reward = o.kl_coef > 0 and o.kl_in == "reward"
        self.needs_old_log_probs = self.kl_in_reward or o.correction != "none"
        self.greedy_baseline = o.advantage == "remax"
        if o.kl_coef > 0 and not self.kl_in_reward and o.kl_estimator == "k3":
            _warn("kl_estimator k3 as a loss has the gradient of the forward KL, not of the reverse KL that it estimates; "
                  "k3_unbiased and k2 have that of the reverse KL")

    def roles(self) -> dict[str, RoleRequest]:
        ref, critic, dtype = self.config.ref, self.config.critic, self.config.model.dtype
        roles = {}
        if self.options.kl_coef > 0:
            roles["ref"] = RoleRequest(trainable=False, path=ref.path, dtype=dtype)
        if self.options.advantage == "gae":
            optim = critic.optim or self.config.actor.optim
            roles["critic"] = RoleRequest(True, critic.path, dtype, head="value", optim=optim)
        return roles

    def wants(self) -> dict[str, frozenset[str]]:
        return {"actor": frozenset({"log_probs", "entropy"}), "critic": frozenset({"values"})}

    def select(self, groups: Sequence[Batch]) -> list[bool]:
        """DAPO's dynamic sampling (arXiv 2503.14476, equation 11): no groups whose rewards, before shaping, are all equal."""
        if not self.options.filter_groups:
            return super().select(groups)
        return [bool((group.sequences["reward"] != group.sequences["reward"][0]).any()) for group in groups]

    def advantages(self, batch: Batch) -> dict[str, Value]:
        o, tokens = self.options, batch.tokens
        rewards, metrics = self._shaped(batch)
        penalty, kl_metrics = self._kl_penalty(batch)
        tokens["token_rewards"] = advantages.at_last_token(rewards, batch) - penalty
        tokens["advantages"] = self.estimate(batch, rewards - batch.sums(penalty))
        if (shape := tuple(tokens["advantages"].shape)) != (batch.num_tokens,):
            raise ValueError(f"{type(self).__name__}.estimate returned {list(shape)} advantages for {len(batch)} samples; there "
                             f"must be one a token, [{batch.num_tokens}]: see rlrun.algorithms.advantages.to_tokens")
        metrics |= kl_metrics
        dropped = torch.zeros(len(batch), dtype=torch.bool)
        if o.correction != "none":
            correction = correct(batch, o.correction, o.correction_cap)
            tokens["correction_weights"] = correction.weights
            dropped, metrics = correction.rejected, {**metrics, **correction.metrics}
        if o.mask_truncated:
            truncated = torch.tensor([reason == "length" for reason in batch.sequences["finish_reason"]])
            metrics["response/masked_ratio"] = Value(float(truncated.sum()), len(batch))
            dropped = dropped | truncated
        if bool(dropped.any()):  # they count in no loss and no denominator; metrics still see whole completions
            tokens.setdefault("response_mask", tokens["loss_mask"])
            for name in {"loss_mask", "gap_mask"} & tokens.keys():
                tokens[name] = tokens[name] & ~dropped[batch.sequence_ids]
        return metrics

    def estimate(self, batch: Batch, totals: Tensor) -> Tensor:
        """[T] advantages, from each sample's reward [S] (shaped, and less its KL) and the columns of the batch, of which
        `token_rewards` sum up to the same."""
        o, tokens, groups = self.options, batch.tokens, batch.sequences["group"]
        mask, rewards = tokens["loss_mask"], tokens["token_rewards"]
        if o.advantage == "gae":
            raw, tokens["returns"] = advantages.gae(rewards, tokens["values"], batch, o.gamma, o.lam)
            return advantages.whiten(raw, mask)
        if o.advantage == "reinforce_pp":
            return advantages.whiten(advantages.returns_to_go(rewards, batch, o.gamma), mask)
        if o.advantage == "remax":
            baseline = advantages.to_tokens(batch.sequences["baseline_reward"].to(rewards.dtype), batch)
            return advantages.returns_to_go(rewards, batch) - baseline
        if o.advantage == "reinforce_pp_baseline":
            centred = advantages.to_tokens(advantages.grpo(totals, groups, scale=False), batch)
            return advantages.whiten(centred, mask & (advantages.sizes(groups) > 1)[batch.sequence_ids])
        per_sequence = {
            "grpo": lambda: advantages.grpo(totals, groups, o.scale_rewards),
            "rloo": lambda: advantages.rloo(totals, groups),
            "opo": lambda: advantages.opo(totals, groups, batch.loss_lengths()),
            "pass_at_k": lambda: advantages.pass_at_k(totals, groups, o.pass_k),
        }[o.advantage]()
        return advantages.to_tokens(per_sequence, batch)

    def _shaped(self, batch: Batch) -> tuple[Tensor, dict[str, Value]]:
        """[S] rewards, less the soft overlong punishment."""
        rewards, o = batch.sequences["reward"], self.options
        if not o.overlong_buffer:
            return rewards, {}
        shape = overlong(batch.loss_lengths(), self.config.rollout.max_new_tokens, o.overlong_buffer)
        return rewards + shape.to(rewards.dtype), {"reward/overlong": Value(float(shape.sum()), len(batch))}

    def _kl_penalty(self, batch: Batch) -> tuple[Tensor, dict[str, Value]]:
        """[T] what the KL takes from each token's reward; moves the coefficient for the next step."""
        mask = batch.tokens["loss_mask"]
        if not self.kl_in_reward:
            return torch.zeros(mask.shape, dtype=batch.sequences["reward"].dtype), {}
        distance = estimate_kl(batch.tokens["log_probs"], batch.tokens["ref_log_probs"], self.options.kl_estimator)
        distance = torch.where(mask, distance, 0)
        mean = Value(float(distance.sum()), float(mask.sum()))
        used = self.kl_coef.value
        if mean.count:
            self.kl_coef.update(mean.result, len(batch))
        return used * distance, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": Value(used)}

    def losses(self, step: int) -> Mapping[str, Loss]:
        """The critic trains in every step, the actor from step `critic_warmup_steps` on."""
        o = self.options
        critic: dict[str, Loss] = {"critic": ValueLoss(o.value_clip)} if o.advantage == "gae" else {}
        if critic and step < o.critic_warmup_steps:
            return critic
        return {**critic, "actor": PolicyLoss(
            o.clip_low, o.clip_high, o.loss_aggregation, self.kl_coef.value if o.kl_in == "loss" else 0.0, o.kl_estimator,
            self.entropy_coef.value, o.loss, o.dual_clip, self.config.rollout.max_new_tokens)}

    def observe(self, metrics: Mapping[str, float]) -> None:
        if "actor/entropy" in metrics:
            self.entropy_coef.update(metrics["actor/entropy"])

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef.value, "entropy": [self.entropy_coef.raw, self.entropy_coef.needed]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_coef.value = state["kl_coef"]
        self.entropy_coef.raw, self.entropy_coef.needed = state["entropy"]


def overlong(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """[S] soft overlong punishment (DAPO, arXiv 2503.14476, equation 13) of completions of `lengths` [S] tokens.

    0 up to `longest - buffer`, then falling evenly to -1 at `longest`."""
    return ((longest - buffer - lengths) / buffer).clamp(-1, 0)


@cache
def _warn(message: str) -> None:
    """Once a process: an algorithm is made for checking, too."""
    log.warning("%s", message)
