"""Hands the loop its next batch: prompts -> rollout -> rewards -> selection; or, offline, prompts with given completions."""

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from rlrun.algorithms.base import Algorithm
from rlrun.batch import Batch
from rlrun.config.schema import Config, StageConfig
from rlrun.data.prompts import encode_answers, encoded
from rlrun.data.sample import Sample
from rlrun.data.sampler import Sampler
from rlrun.environments.turns import Episode
from rlrun.generation import Generator, Rollouts
from rlrun.metrics import Value, statistics
from rlrun.partial import PartialRollouts
from rlrun.rewards.protocol import Score
from rlrun.rollout.protocol import SamplingParams

log = logging.getLogger(__name__)

Phase = Callable[[str], AbstractContextManager[None]]  # what times a part of a step under its name


class Collector:
    """The source of a stage's batches. These are its methods where no engine is at work."""

    def next(self, step: int, phase: Phase, last: bool) -> tuple[Batch | None, dict[str, Value]]:
        """The batch of a step (None where nothing is left to train on) and metrics of how it came about.

        `last` says that the stage ends with this step."""
        raise NotImplementedError

    def records(self, batch: Batch) -> list[dict[str, Any]]:
        """The last batch's completions, for dumps, with what `batch`, made of them, has learned since."""
        return []

    def position(self) -> dict[str, Any]:
        """The sampler's state after the last batch handed out: a resumed run goes on from there."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until no engine is at work."""


@dataclass(frozen=True)
class Drawn:
    """A step's samples, and where the sampler stood after them."""

    batch: Batch | None
    metrics: dict[str, Value]
    rollouts: list[Rollouts]
    position: dict[str, Any]


class RolloutCollector(Collector):
    """Samples prompts and lets the policy answer, until enough groups are kept or `max_rounds` is reached.

    `position` is that of an earlier run's collector in the same stage."""

    def __init__(self, config: Config, stage: StageConfig, sampler: Sampler, generator: Generator, algorithm: Algorithm,
                 position: Mapping[str, Any]) -> None:
        self.config = config
        self.options = stage.algorithm
        self.sampler = sampler
        self.generator = generator
        self.algorithm = algorithm
        r = config.rollout
        self.partial = PartialRollouts(generator, r.tokens_per_round, r.max_new_tokens) if r.tokens_per_round else None
        if self.partial and position.get("in_flight"):
            self.partial.load(position["in_flight"], chain(*sampler.sources))
        self.last = Drawn(None, {}, [], self._position())

    def next(self, step: int, phase: Phase, last: bool) -> tuple[Batch | None, dict[str, Value]]:
        with phase("update_weights"):
            self.generator.workers.sync(step)
        with phase("gen"):
            self.last = self.draw(step)
        return self._handed_out(step)

    def draw(self, step: int) -> Drawn:
        """A step's samples, of the policy that the engines have."""
        r, wanted = self.config.rollout, self.options.prompts_per_step
        params = self.generator.params(r.temperature, r.top_p, r.top_k)
        kept, self.algorithm.leftovers = self.algorithm.leftovers, []
        all_rollouts: list[Rollouts] = []
        drawn: list[Batch] = []
        asked, before = 0, len(kept)
        if self.partial:
            self.partial.new_policy()
        while len(kept) < wanted and len(all_rollouts) < self.options.max_rounds:
            rollouts = self._round(self.algorithm.draws(wanted - len(kept)), params)
            all_rollouts.append(rollouts)
            prompts = dict(zip(rollouts.groups, rollouts.samples, strict=True))
            asked += len(prompts)
            groups = self._groups(rollouts)
            if self.algorithm.greedy_baseline:
                groups = self._with_baseline(groups, list(prompts.items()))
            drawn += groups
            kept += [g for g, keep in zip(groups, self.algorithm.select(groups), strict=True) if keep]
        rounds = len(all_rollouts)
        metrics = {"rollout/rounds": Value(rounds, 1.0), "rollout/kept_groups_ratio": Value(len(kept) - before, asked),
                   **self.algorithm.drawn(drawn),
                   **reward_metrics(score for rollouts in all_rollouts for score in rollouts.scores)}
        if self.config.environment.name is not None:
            turns = [sum(p.by == "policy" for p in e.parts) for rollouts in all_rollouts for e in rollouts.episodes]
            metrics |= statistics("rollout/turns", torch.tensor(turns))
        if self.partial:
            metrics |= self.partial.metrics()
        if len(kept) < wanted:
            log.warning("step %d: %d of %d prompts are left after %d rounds", step, len(kept), wanted, rounds)
        batch = Batch.concat(kept[:wanted]) if kept else None
        self.algorithm.leave(kept[wanted:])
        return Drawn(batch, metrics, all_rollouts, self._position())

    def _round(self, prompts: int, params: SamplingParams) -> Rollouts:
        """All completions of so many prompts; of as many as there are, where completions take several rounds."""
        n, partial = self.config.rollout.samples_per_prompt, self.partial
        draws = self.sampler.take(max(0, prompts - len(partial.complete)) if partial else prompts)
        episodes = [Episode(draw, s, key, self._compared(key)) for draw, _, s in draws
                    for key in (f"{s.uid}|{draw}|{i}" for i in range(n))]
        return partial.run(episodes, params, prompts) if partial else self.generator.run(episodes, params)

    def _position(self) -> dict[str, Any]:
        return self.sampler.state_dict() | ({"in_flight": self.partial.state()} if self.partial else {})

    def _handed_out(self, step: int) -> tuple[Batch | None, dict[str, Value]]:
        """The last batch, and its metrics with how many updates ago its samples were begun."""
        batch, metrics, r = self.last.batch, self.last.metrics, self.config.rollout
        if batch is not None and (r.max_staleness or r.tokens_per_round):
            metrics |= statistics("rollout/staleness", step - batch.sequences["policy_version"])
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
        episodes = [Episode(draw, s, f"{s.uid}|{draw}|greedy") for draw, s in draws]
        greedy = self.generator.run(episodes, self.generator.params(0.0, 1.0, 0))
        rewards = dict(zip(greedy.groups, (score.reward for score in greedy.scores), strict=True))
        scored = [(group, rewards[int(group.sequences["group"][0])]) for group in groups]
        for group, reward in scored:
            group.sequences["baseline_reward"] = torch.full((len(group),), torch.nan if reward is None else reward)
        return [group for group, reward in scored if reward is not None]

    def _compared(self, key: str) -> bool:
        """Whether a sample is of the random share whose engine log-probabilities are compared with the trainer's."""
        return random.Random(f"gap|{self.config.run.seed}|{key}").random() < self.config.rollout.gap_fraction

    def records(self, batch: Batch) -> list[dict[str, Any]]:
        """Those in `batch` have `advantages` of their tokens in the loss, and these tokens' `texts`."""
        tokens, mask, learned, ends = batch.tokens, batch.tokens["loss_mask"], {}, batch.cu_seqlens.tolist()
        groups = batch.sequences["group"].tolist() if "advantages" in tokens else ()  # which an algorithm may do without
        for row, group in enumerate(groups):
            part = slice(ends[row], ends[row + 1])
            ids = tokens["ids"][part]
            learned[group, tuple(ids.tolist())] = {
                "advantages": tokens["advantages"][part][mask[part]].tolist(),
                "texts": self.generator.tokenizer.batch_decode(ids[mask[part]][:, None])}
        return [record | learned.get((e.group, e.stream), {}) for rollouts in self.last.rollouts
                for e, record in zip(rollouts.episodes, rollouts.records(), strict=True)]

    def position(self) -> dict[str, Any]:
        return self.last.position


class AheadCollector(RolloutCollector):
    """One step ahead: engines with ranks of their own draw a step's samples while the step before it trains.

    So samples are of the policy before the last update. What is being drawn when a run ends is drawn anew after a resume."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.thread = ThreadPoolExecutor(1, "ahead")
        self.pending: Future[Drawn] | None = None

    def next(self, step: int, phase: Phase, last: bool) -> tuple[Batch | None, dict[str, Value]]:
        if self.pending is None:
            super().next(step, phase, last)
        else:
            with phase("gen"):
                self.last = self.pending.result()
            with phase("update_weights"):
                self.generator.workers.sync(step)
        self.pending = None if last else self.thread.submit(self.draw, step + 1)
        return self._handed_out(step)

    def settle(self) -> None:
        if self.pending is not None:
            wait([self.pending])


@dataclass
class AnswerCollector(Collector):
    """Offline: each prompt followed by the completions that the algorithm learns from."""

    stage: StageConfig
    sampler: Sampler
    tokenizer: Any
    algorithm: Algorithm

    def next(self, step: int, phase: Phase, last: bool) -> tuple[Batch | None, dict[str, Value]]:
        draws = self.sampler.take(self.stage.algorithm.prompts_per_step)
        return answer_batch([(number, sample) for number, _, sample in draws], self.algorithm, self.tokenizer), {}

    def position(self) -> dict[str, Any]:
        return self.sampler.state_dict()


def answer_batch(rows: Sequence[tuple[int, Sample]], algorithm: Algorithm, tokenizer: Any) -> Batch:
    """An offline algorithm's completions of (group, sample) rows. `preference` counts a sample's completions, from 0."""
    pairs = [(group, s, i, c) for group, s in rows for i, c in enumerate(algorithm.completions(s))]
    answers = encode_answers(tokenizer, [c for *_, c in pairs])
    flat = [(group, s, i, ids) for (group, s, i, _), ids in zip(pairs, answers, strict=True)]
    groups = torch.tensor([group for group, _, _, _ in flat])
    return Batch.from_sequences(
        [{"ids": [*s.prompt_ids, *ids], "loss_mask": [False] * len(s.prompt_ids) + [True] * len(ids)} for _, s, _, ids in flat],
        {
            "uid": [s.uid for _, s, _, _ in flat], "data_source": [s.data_source for _, s, _, _ in flat],
            "group": groups, "pair": groups, "preference": torch.tensor([i for _, _, i, _ in flat]),
            "prompt_length": torch.tensor([len(s.prompt_ids) for _, s, _, _ in flat]),
        },
    )


def check_answers(samples: Iterable[Sample], algorithm: Algorithm, tokenizer: Any, max_tokens: int) -> None:
    """Raises ValueError, naming the row, where an offline algorithm cannot learn from one in micro-batches of `max_tokens`."""
    def lengths(chunk: Sequence[Sample]) -> list[list[int]]:
        completions = [algorithm.completions(sample) for sample in chunk]
        ids = iter(encode_answers(tokenizer, list(chain(*completions))))
        return [[len(sample.prompt_ids) + len(next(ids)) for _ in own] for sample, own in zip(chunk, completions, strict=True)]

    for sample, tokens in encoded(samples, lengths, lambda sample: f"row {sample.uid}"):
        together = (max if algorithm.atom == "sequence" else sum)(tokens)
        if together > max_tokens:
            raise ValueError(f"row {sample.uid}: one {algorithm.atom} has {together} tokens, prompt included, more than "
                             f"actor.tokens_per_micro_batch = {max_tokens}")


def to_batch(rollouts: Rollouts, rows: Sequence[int]) -> Batch:
    """Episodes as a batch: what the policy drew inside `loss_mask`, prompts and environments outside, by true lengths."""
    episodes = [rollouts.episodes[i] for i in rows]
    prompts = [len(e.sample.prompt_ids) for e in episodes]
    masks = [[False] * prompt + e.loss_mask for e, prompt in zip(episodes, prompts, strict=True)]
    return Batch.from_sequences(
        [{"ids": e.stream, "loss_mask": mask, "rollout_log_probs": [0.0] * prompt + e.log_probs,
          "gap_mask": [m and e.compared and i >= prompt + e.older for i, m in enumerate(mask)]}
         for e, mask, prompt in zip(episodes, masks, prompts, strict=True)],
        {
            "uid": [e.sample.uid for e in episodes], "data_source": [e.sample.data_source for e in episodes],
            "group": torch.tensor([e.group for e in episodes]),
            "reward": torch.tensor([rollouts.scores[i].reward for i in rows], dtype=torch.float32),
            "correct": torch.tensor([rollouts.scores[i].correct for i in rows], dtype=torch.float32),
            "finish_reason": [e.finish_reason for e in episodes],
            "policy_version": torch.tensor([e.policy_version for e in episodes]),
            "prompt_length": torch.tensor(prompts),
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
