"""PRIME: a policy gradient with a reward model that is trained beside the policy, on outcomes alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlrun.algorithms import advantages as outcome
from rlrun.algorithms.policy_gradient import PolicyAlgorithm
from rlrun.batch import Batch, from_text, inverse, to_text
from rlrun.errors import RunError
from rlrun.metrics import Value, merge, of_role
from rlrun.models.folder import load_tokenizer
from rlrun.workers.protocol import RoleRequest
from rlrun_prime.advantages import leave_one_out, normalised, whiten
from rlrun_prime.plugin import PrimeConfig
from rlrun_prime.rewards import COLUMNS, REFERENCE, ImplicitRewardLoss, delimited, gathered, implicit

if TYPE_CHECKING:
    from rlrun.batch import Atom
    from rlrun.config.schema import Config, StageConfig
    from rlrun.workers.group import WorkerGroup

FORMS = ("rloo", "grpo", "reinforce_pp", "gae")
"""Advantages that have a form with process rewards."""
_NO_SIGNAL = 1e-3
"""Nats a token: mean log-ratios that differ by less say nothing yet, and are not scaled up further."""
_SMALL = 0.01
"""A deviation of advantages below this share of the coefficients is not scaled up further: outcomes are from 0 to 1."""


class Prime(PolicyAlgorithm):
    """PRIME (arXiv 2502.01456). Further roles: `prm`, trained in `score`, and a frozen `prm_ref`."""

    def __init__(self, config: Config, stage: StageConfig) -> None:
        super().__init__(config, stage)
        self.prime = config.section("prime", PrimeConfig)
        if problems := list(_problems(self.prime, config, stage)) or list(_strangers(self.prime, config)):
            raise ValueError("\n".join(problems))
        self.loss = ImplicitRewardLoss(self.prime.beta, self.prime.loss)
        self.needs_old_log_probs = self.needs_old_log_probs or self.prime.reference == "policy"
        self.steps = 0
        """Steps in which the reward model scored samples."""
        self.skipped_in_a_row = 0

    def roles(self) -> dict[str, RoleRequest]:
        p, dtype, each = self.prime, self.config.model.dtype, _updates(self.stage)
        roles = super().roles() | {"prm": RoleRequest(p.update != "none", p.path, dtype, optim=p.optim, updates_per_step=each)}
        if p.reference == "sft" and not ("ref" in roles and roles["ref"].path == self._reference_path):
            roles["prm_ref"] = RoleRequest(False, self._reference_path, dtype)
        return roles

    @property
    def _reference_path(self) -> str | None:
        return self.prime.reference_path or self.prime.path

    def draws(self, missing: int) -> int:
        return math.ceil(missing * self.prime.oversample)

    def select(self, groups: Sequence[Batch]) -> list[bool]:
        """The paper's online prompt filter, and what the stage's own options filter."""
        return [keep and self._rejected(group) is None for keep, group in zip(super().select(groups), groups, strict=True)]

    def _rejected(self, group: Batch) -> str | None:
        """Why a group is not trained on; None: it is."""
        low, high = self.prime.accuracy_range
        accuracy = float(group.sequences["correct"].double().mean())
        if self.prime.drop_truncated and "length" in group.sequences["finish_reason"]:
            return "truncated"
        if accuracy < low - 1e-6:
            return "too_hard"
        return "too_easy" if accuracy > high + 1e-6 else None

    def drawn(self, groups: Sequence[Batch]) -> dict[str, Value]:
        reasons = [self._rejected(group) for group in groups]
        return {f"prime/filter/{name}": Value(reasons.count(name), len(groups)) for name in ("too_hard", "too_easy", "truncated")}

    def leave(self, groups: list[Batch]) -> None:
        """Kept groups go on with the engine's log-probabilities, but count no more in the gap between it and the trainer."""
        if self.prime.leftovers == "keep":
            for group in groups:
                group.tokens["gap_mask"] = torch.zeros_like(group.tokens["loss_mask"])
            self.leftovers = groups

    def score(self, batch: Batch, workers: WorkerGroup) -> dict[str, Value]:
        """Add `process_rewards` [T], and the samples' whole rewards before and after the update where they are known; train."""
        began, update = time.perf_counter(), self.prime.update
        _check(batch, {"ids", "loss_mask", "group", "correct"} | ({"log_probs"} if self.prime.reference == "policy" else set()))
        batch.tokens[REFERENCE] = self._reference(batch, workers)
        part = Batch(batch.cu_seqlens, {name: batch.tokens[name] for name in ("ids", "loss_mask", REFERENCE)},
                     {name: batch.sequences[name] for name in ("group", "correct")}, batch.ragged)
        metrics: dict[str, Value] = {}
        rewards: dict[str, Tensor] = {}
        minis = self._rows(part)
        if update == "none" or (update == "after" and len(minis) > 1):  # all scores are to be one model's
            rewards["before"] = self._rewards(part, workers)
        if update != "none":
            metrics, kept = self._train(part, minis, workers)
            if kept is not None:
                rewards.setdefault("before", implicit(kept, part, self.prime.beta))
        if update == "before":
            rewards["after"] = self._rewards(part, workers)
        elif not rewards:  # an update had nothing to learn from, and the model is as it was
            rewards["before"] = self._rewards(part, workers)
        for when, reward in rewards.items():
            batch.sequences[COLUMNS[when]] = batch.sums(reward)
        batch.tokens["process_rewards"] = self._placed(rewards["after" if "after" in rewards else "before"], batch)
        self.steps += 1
        return metrics | {"prime/leftovers": Value(len(self.leftovers)), "timing_s/prm": Value(time.perf_counter() - began)}

    def _reference(self, batch: Batch, workers: WorkerGroup) -> Tensor:
        if self.prime.reference == "policy":
            return batch.tokens["log_probs"]
        if "prm_ref" not in workers.roles:  # it is the policy's own reference
            return batch.tokens["ref_log_probs"]
        return workers.forward("prm_ref", batch, {"log_probs"}, self.temperature)["log_probs"]

    def _rewards(self, part: Batch, workers: WorkerGroup) -> Tensor:
        """[T] token rewards of the reward model as it is now."""
        return implicit(workers.forward("prm", part, {"log_probs"}, self.temperature)["log_probs"], part, self.prime.beta)

    def _rows(self, part: Batch) -> list[list[int]]:
        """Rows of each mini-batch: whole groups, as many as in an update of the actor."""
        groups, each = part.atoms("group"), self.options.prompts_per_update or self.options.prompts_per_step
        return [[row for group in groups[i : i + each] for row in group] for i in range(0, len(groups), each)]

    def _train(
        self, part: Batch, minis: list[list[int]], workers: WorkerGroup
    ) -> tuple[dict[str, Value], Tensor | None]:
        """One update on each mini-batch; log-probabilities [T] of their own forwards, where all had something to learn from."""
        atom: Atom = "group" if self.prime.loss == "dpo" else "sequence"
        metrics: list[dict[str, Value]] = []
        done: list[tuple[list[int], Batch]] = []
        for rows in minis:
            mini, kept = part.select(rows), dict[str, Tensor]()
            denominators, some = self.loss.denominators(mini)
            if some:
                update = workers.update("prm", mini, self.loss, denominators, self.temperature, atom, kept)
                self._count_skips(update)
                metrics.append(of_role("prime", update))
                done.append((rows, Batch(mini.cu_seqlens, kept)))
        if len(done) < len(minis):
            return merge(metrics), None
        whole = Batch.concat([kept for _, kept in done]).select(inverse(rows for rows, _ in done))
        return merge(metrics), whole.tokens["log_probs"]

    def _count_skips(self, update: dict[str, Value]) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if update["skipped"].total else 0
        if self.skipped_in_a_row >= self.config.trainer.max_skipped_updates:
            raise RunError(f"{self.skipped_in_a_row} updates of the prm in a row had a non-finite gradient "
                           "(trainer.max_skipped_updates)", "lower prime.optim.lr or prime.beta")

    def _placed(self, rewards: Tensor, batch: Batch) -> Tensor:
        if self.prime.granularity == "token":
            return rewards
        ends = torch.zeros_like(batch.tokens["loss_mask"])
        if self.prime.granularity == "segment":
            ends = delimited(batch, self.prime.delimiter, _decoder(self.config.model.tokenizer or self.config.model.path))
        return gathered(rewards, batch, ends)

    def estimate(self, batch: Batch, totals: Tensor) -> Tensor:
        """[T] advantages of outcomes `totals` [S] and process rewards (arXiv 2502.01456, equations 5, 7 and 8; gae: both are
        the rewards of PPO). Process rewards are discounted by `gamma`, outcomes are not."""
        o, p, tokens, groups = self.options, self.prime, batch.tokens, batch.sequences["group"]
        process, warming = tokens["process_rewards"].double(), self.steps <= p.warmup_steps
        weight = 0.0 if warming else p.process_coef
        if o.advantage == "gae":
            rewards = p.outcome_coef * tokens["token_rewards"].double() + weight * process
            tokens["token_rewards"] = rewards.to(tokens["values"].dtype)
            return super().estimate(batch, totals)
        if o.advantage == "rloo":
            centred, whole = leave_one_out(process, batch, p.advantage == "reference"), outcome.rloo(totals, groups)
        elif o.advantage == "grpo":
            centred = normalised(process, batch, o.scale_rewards, _NO_SIGNAL * p.beta)
            whole = outcome.grpo(totals, groups, o.scale_rewards)
        else:
            centred, whole = process, totals
        result = p.outcome_coef * outcome.to_tokens(whole.double(), batch)
        result = result + weight * outcome.returns_to_go(centred, batch, o.gamma)
        if p.advantage == "reference":
            result = whiten(result, tokens["loss_mask"], _SMALL * (p.outcome_coef + p.process_coef))
        return result.to(tokens["process_rewards"].dtype)

    def state_dict(self) -> dict[str, Any]:
        left = to_text([vars(group) for group in self.leftovers]) if self.leftovers else ""
        return super().state_dict() | {"steps": self.steps, "leftovers": left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = state["steps"]
        if state["leftovers"]:
            self.leftovers = [Batch(**group) for group in from_text(state["leftovers"])]


def _updates(stage: StageConfig) -> int:
    """Updates of the reward model in one step."""
    return stage.algorithm.prompts_per_step // (stage.algorithm.prompts_per_update or stage.algorithm.prompts_per_step)


def _problems(p: PrimeConfig, config: Config, stage: StageConfig) -> Iterator[str]:
    o, low_high = stage.algorithm, p.accuracy_range
    if o.advantage not in FORMS:
        yield (f"algorithm.advantage {o.advantage} has no form with process rewards: prime knows {', '.join(FORMS)}")
    if len(low_high) != 2 or not 0 <= low_high[0] <= low_high[1] <= 1:
        yield f"prime.accuracy_range is {low_high}; it must be two numbers, 0 <= low <= high <= 1"
    if p.process_coef + p.outcome_coef == 0:
        yield "prime.process_coef and prime.outcome_coef are both 0: nothing is left to learn from"
    if p.granularity == "segment" and not p.delimiter:
        yield "prime.granularity segment needs a prime.delimiter"
    if p.reference == "policy" and p.reference_path is not None:
        yield "prime.reference_path has no effect with prime.reference policy"
    if p.update == "none" and p.reference == "sft" and p.reference_path in (None, p.path):
        yield ("prime.update none with a reference equal to the reward model makes every process reward 0: name the models that "
               "it was trained from and is, prime.reference_path and prime.path")
    if p.leftovers == "keep" and (p.oversample == 1 or o.correction == "none" or config.rollout.max_staleness):
        yield ("prime.leftovers keep needs prime.oversample > 1, or there are none; algorithm.correction, as they are of an "
               "older policy; and rollout.max_staleness 0")
    if stage.steps is not None and p.update != "none" and p.optim.warmup_steps >= stage.steps * _updates(stage):
        yield (f"prime.optim.warmup_steps = {p.optim.warmup_steps} leaves none of the {stage.steps * _updates(stage)} updates of "
               "the reward model")


def _strangers(p: PrimeConfig, config: Config) -> Iterator[str]:
    """Models that would read the policy's ids as other text."""
    own = config.model.tokenizer or config.model.path
    for key, path in (("prime.path", p.path), ("prime.reference_path", p.reference_path)):
        if path is not None and _vocabulary(path) != _vocabulary(own):
            yield f"{key} {path} has another vocabulary or chat template than the policy's tokenizer {own}; they must be the same"


@cache
def _vocabulary(path: str) -> tuple[dict[str, int], Any]:
    tokenizer = load_tokenizer(path)
    return tokenizer.get_vocab(), tokenizer.chat_template


@cache
def _decoder(path: str) -> Any:
    """Text of one token id."""
    tokenizer = load_tokenizer(path)
    return cache(lambda token: tokenizer.decode([token], clean_up_tokenization_spaces=False))


def _check(batch: Batch, needed: set[str]) -> None:
    if absent := sorted(needed - batch.tokens.keys() - batch.sequences.keys()):
        raise ValueError(f"prime needs the columns {', '.join(sorted(needed))} of a step's batch; it has no {', '.join(absent)}: "
                         "an algorithm or collector before it left them out")
    correct = batch.sequences["correct"]
    if bool(((correct < 0) | (correct > 1) | correct.isnan()).any()):
        raise ValueError(f"prime learns from outcomes between 0 and 1, but the rewards' `correct` goes from "
                         f"{float(correct.min()):g} to {float(correct.max()):g}: return it as \"correct\" beside \"score\"")
