"""Hands the loop its next batch: prompts -> rollout -> rewards -> selection; or, offline, prompts with given completions."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlrun.batch import Batch
from rlrun.data.prompts import encode_answer
from rlrun.metrics import Value
from rlrun.rewards.protocol import RewardItem, Score
from rlrun.rollout.protocol import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from rlrun.algorithms.base import Algorithm
    from rlrun.config.schema import Config, StageConfig
    from rlrun.data.sample import Sample
    from rlrun.data.sampler import Sampler
    from rlrun.rewards.pool import RewardPool
    from rlrun.workers.group import WorkerGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollouts:
    """Scored completions of one sample each, in order of request."""

    samples: list[Sample]
    groups: list[int]
    completions: list[Completion]
    scores: list[Score]
    texts: list[str]

    def records(self) -> list[dict[str, Any]]:
        """One JSON-able record a completion, for dumps."""
        return [
            {"uid": s.uid, "group": g, "data_source": s.data_source, "prompt": s.prompt, "completion": t, "answer": s.answer,
             "reward": score.reward, "correct": score.correct, "parts": dict(score.parts), "error": score.error,
             "pred": score.pred, "tokens": len(c.ids), "finish_reason": c.finish_reason, "policy_version": c.policy_version}
            for s, g, c, score, t in zip(self.samples, self.groups, self.completions, self.scores, self.texts, strict=True)
        ]


class Collector(Protocol):
    """The source of a stage's batches."""

    def next(self, step: int) -> tuple[Batch | None, dict[str, Value]]:
        """The batch of a step (None where nothing is left to train on) and metrics of how it came about."""

    def records(self) -> list[dict[str, Any]]:
        """The last batch's completions, for dumps."""


class Generator:
    """Generation and scoring, as training and validation share them: rewards are computed while ranks still generate."""

    def __init__(self, config: Config, workers: WorkerGroup, pool: RewardPool, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        self.config = config
        self.workers = workers
        self.pool = pool
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids

    def params(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        r = self.config.rollout
        return SamplingParams(temperature, r.max_new_tokens, self.eos_ids, top_p, top_k, tuple(r.stop), self.config.run.seed)

    def run(self, draws: Sequence[tuple[int, Sample]], keys: Sequence[str], params: SamplingParams) -> Rollouts:
        """A completion for each (group, sample), drawn with the noise of its key, and its score."""
        requests = [Request(i, s.prompt_ids, key) for i, ((_, s), key) in enumerate(zip(draws, keys, strict=True))]
        completions: dict[int, Completion] = {}
        texts: dict[int, str] = {}
        scoring: dict[int, Any] = {}
        for finished in self.workers.generate(requests, params):
            for completion in finished:
                completions[completion.index] = completion
                texts[completion.index] = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
            samples = [draws[c.index][1] for c in finished]
            items = [RewardItem(s.prompt, texts[c.index], s.answer, s.data_source, s.extra)
                     for c, s in zip(finished, samples, strict=True)]
            scoring.update(zip((c.index for c in finished), self.pool.submit(items), strict=True))
        order = range(len(draws))
        return Rollouts(
            [s for _, s in draws], [g for g, _ in draws], [completions[i] for i in order],
            self.pool.collect([scoring[i] for i in order]), [texts[i] for i in order],
        )


class RolloutCollector:
    """Samples prompts and lets the policy answer, until enough groups are kept or `max_rounds` is reached."""

    def __init__(self, config: Config, stage: StageConfig, sampler: Sampler, generator: Generator, algorithm: Algorithm) -> None:
        self.config = config
        self.options = stage.algorithm
        self.sampler = sampler
        self.generator = generator
        self.algorithm = algorithm
        self.last: list[Rollouts] = []

    def next(self, step: int) -> tuple[Batch | None, dict[str, Value]]:
        r, wanted = self.config.rollout, self.options.prompts_per_step
        params = self.generator.params(r.temperature, r.top_p, r.top_k)
        kept: list[Batch] = []
        self.last, rounds, drawn = [], 0, 0
        while len(kept) < wanted and rounds < self.options.max_rounds:
            draws = self.sampler.take(wanted - len(kept))
            rounds, drawn = rounds + 1, drawn + len(draws)
            rows = [(draw, sample) for draw, _, sample in draws for _ in range(r.samples_per_prompt)]
            keys = [f"{s.uid}|{d}|{n}" for d, _, s in draws for n in range(r.samples_per_prompt)]
            rollouts = self.generator.run(rows, keys, params)
            self.last.append(rollouts)
            groups = self._groups(rollouts)
            if self.algorithm.greedy_baseline:
                groups = self._with_baseline(groups, [(draw, sample) for draw, _, sample in draws])
            kept += [g for g, keep in zip(groups, self.algorithm.select(groups), strict=True) if keep]
        metrics = {"rollout/rounds": Value(rounds, 1.0), "rollout/kept_groups_ratio": Value(len(kept), drawn),
                   **reward_metrics(score for rollouts in self.last for score in rollouts.scores)}
        if len(kept) < wanted:
            log.warning("step %d: %d of %d prompts are left after %d rounds", step, len(kept), wanted, rounds)
        if not kept:
            return None, metrics
        batch = Batch.concat(kept)
        batch.tokens["gap_mask"] = self._gap_mask(batch, step)
        return batch, metrics

    def _groups(self, rollouts: Rollouts) -> list[Batch]:
        """A batch for each prompt, of the completions that have a reward; none for a prompt without any."""
        rows: dict[int, list[int]] = {}
        for i, (group, score) in enumerate(zip(rollouts.groups, rollouts.scores, strict=True)):
            if score.reward is not None:
                rows.setdefault(group, []).append(i)
        return [to_batch(rollouts, r) for r in rows.values()]

    def _with_baseline(self, groups: list[Batch], draws: list[tuple[int, Sample]]) -> list[Batch]:
        """The groups with `baseline_reward`, that of the prompt's greedy completion; without those where it has none."""
        greedy = self.generator.run(draws, [f"{s.uid}|{draw}|greedy" for draw, s in draws], self.generator.params(0.0, 1.0, 0))
        rewards = dict(zip(greedy.groups, (score.reward for score in greedy.scores), strict=True))
        scored = [(group, rewards[int(group.sequences["group"][0])]) for group in groups]
        for group, reward in scored:
            group.sequences["baseline_reward"] = torch.full((len(group),), torch.nan if reward is None else reward)
        return [group for group, reward in scored if reward is not None]

    def _gap_mask(self, batch: Batch, step: int) -> torch.Tensor:
        """[T] tokens of a random share of samples, whose engine log-probabilities are compared with the trainer's."""
        dice = random.Random(f"gap|{self.config.run.seed}|{step}")
        chosen = torch.tensor([dice.random() < self.config.rollout.gap_fraction for _ in range(len(batch))])
        return chosen[batch.sequence_ids] & batch.tokens["loss_mask"]

    def records(self) -> list[dict[str, Any]]:
        return [record for rollouts in self.last for record in rollouts.records()]


class AnswerCollector:
    """Offline: each prompt followed by the completions that the algorithm learns from."""

    def __init__(self, stage: StageConfig, sampler: Sampler, tokenizer: Any, algorithm: Algorithm) -> None:
        self.options = stage.algorithm
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.algorithm = algorithm

    def next(self, step: int) -> tuple[Batch | None, dict[str, Value]]:
        draws = self.sampler.take(self.options.prompts_per_step)
        return answer_batch([(number, sample) for number, _, sample in draws], self.algorithm, self.tokenizer), {}

    def records(self) -> list[dict[str, Any]]:
        return []


def answer_batch(rows: Sequence[tuple[int, Sample]], algorithm: Algorithm, tokenizer: Any) -> Batch:
    """An offline algorithm's completions of (group, sample) rows. `preference` counts a sample's completions, from 0."""
    flat = [(group, s, i, encode_answer(tokenizer, c)) for group, s in rows for i, c in enumerate(algorithm.completions(s))]
    groups = torch.tensor([group for group, _, _, _ in flat])
    return Batch.from_sequences(
        [{"ids": [*s.prompt_ids, *ids], "loss_mask": [False] * len(s.prompt_ids) + [True] * len(ids)} for _, s, _, ids in flat],
        {
            "uid": [s.uid for _, s, _, _ in flat],
            "group": groups,
            "pair": groups,
            "preference": torch.tensor([i for _, _, i, _ in flat]),
            "data_source": [s.data_source for _, s, _, _ in flat],
            "prompt_length": torch.tensor([len(s.prompt_ids) for _, s, _, _ in flat]),
        },
    )


def to_batch(rollouts: Rollouts, rows: Sequence[int]) -> Batch:
    """Completions as a batch: prompts outside `loss_mask`, all completion tokens inside, by their true lengths."""
    samples = [rollouts.samples[i] for i in rows]
    completions = [rollouts.completions[i] for i in rows]
    return Batch.from_sequences(
        [
            {
                "ids": [*s.prompt_ids, *c.ids],
                "loss_mask": [False] * len(s.prompt_ids) + [True] * len(c.ids),
                "rollout_log_probs": [0.0] * len(s.prompt_ids) + list(c.log_probs),
            }
            for s, c in zip(samples, completions, strict=True)
        ],
        {
            "uid": [s.uid for s in samples],
            "group": torch.tensor([rollouts.groups[i] for i in rows]),
            "reward": torch.tensor([rollouts.scores[i].reward for i in rows], dtype=torch.float32),
            "correct": torch.tensor([rollouts.scores[i].correct for i in rows], dtype=torch.float32),
            "data_source": [s.data_source for s in samples],
            "finish_reason": [c.finish_reason for c in completions],
            "policy_version": torch.tensor([c.policy_version for c in completions]),
            "prompt_length": torch.tensor([len(s.prompt_ids) for s in samples]),
        },
    )


def reward_metrics(scores: Iterable[Score]) -> Mapping[str, Value]:
    """Each part's mean, the share of correct completions, and how many could not be scored."""
    scores = list(scores)
    sums: dict[str, Value] = {
        "reward/correct": Value(sum(s.correct for s in scores if s.error is None), sum(s.error is None for s in scores)),
        "reward/errors": Value(sum(s.error is not None for s in scores), None, "sum"),
    }
    for score in scores:
        for part, value in score.parts.items():
            old = sums.get(f"reward/{part}", Value(0.0, 0.0))
            sums[f"reward/{part}"] = Value(old.total + value, (old.count or 0.0) + 1)
    return {name: value for name, value in sums.items() if value.count != 0}
