"""Generation and scoring, as training and validation share them: prompts in, scored completions or conversations out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlrun.environments.protocol import Answer
from rlrun.environments.turns import Episode, Part, after, combined, continuation
from rlrun.rewards.model import RewardModel
from rlrun.rewards.pool import MODEL, RewardPool, Ticket, part_specs, reward_parts
from rlrun.rewards.protocol import Score
from rlrun.rewards.scoring import PartSpec
from rlrun.rollout.protocol import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from rlrun.config.schema import Config
    from rlrun.data.sample import Sample
    from rlrun.plugins import Plugins
    from rlrun.workers.group import WorkerGroup


@dataclass(frozen=True)
class Rollouts:
    """Scored episodes of one sample each, in order of request."""

    episodes: list[Episode]
    scores: list[Score]

    @property
    def samples(self) -> list[Sample]:
        return [e.sample for e in self.episodes]

    @property
    def groups(self) -> list[int]:
        return [e.group for e in self.episodes]

    def records(self) -> list[dict[str, Any]]:
        """One JSON-able record an episode, for dumps; `turns` where an environment spoke."""
        return [
            {"uid": e.sample.uid, "group": e.group, "data_source": e.sample.data_source, "prompt": e.sample.prompt,
             "completion": e.messages[-1]["content"], "answer": e.sample.answer, "reward": score.reward,
             "correct": score.correct, "parts": dict(score.parts), "error": score.error, "pred": score.pred,
             "tokens": len(e.ids), "finish_reason": e.finish_reason, "policy_version": e.policy_version}
            | ({"turns": [{"by": p.by, "tokens": len(p.ids), "text": p.text} for p in e.parts]} if len(e.parts) > 1 else {})
            for e, score in zip(self.episodes, self.scores, strict=True)
        ]


def make_scorers(
    config: Config, plugins: Plugins, closing: ExitStack
) -> tuple[RewardPool | None, RewardPool | None, RewardModel | None]:
    """The processes of rewards and environment, and the reward model, as far as they are configured.

    `closing` ends the processes. Raises ValueError for a reward or environment that cannot be made.
    """

    def pool(parts: Sequence[PartSpec]) -> RewardPool:
        started = RewardPool(config.reward, parts, plugins.files())
        closing.callback(started.close)
        return started

    specs, name = part_specs(config.reward, plugins.provided("reward")), config.environment.name
    rewards = pool(specs) if specs else None
    environment = None
    if name is not None:
        path = plugins.provided("environment")[name]
        environment = pool([PartSpec("environment", path, 1.0, dict(config.environment.kwargs))])
    model = [RewardModel(config, part.weight, **part.kwargs) for part in reward_parts(config.reward) if part.kind == MODEL]
    return rewards, environment, model[0] if model else None


class Generator:
    """Draws completions and has them scored while ranks still generate. With an environment, goes on for several turns.

    `rewards` and `environment` are pools of processes, `model` a reward model on the ranks; each may be missing.
    """

    def __init__(
        self, config: Config, workers: WorkerGroup, tokenizer: Any, eos_ids: tuple[int, ...],
        rewards: RewardPool | None = None, environment: RewardPool | None = None, model: RewardModel | None = None,
    ) -> None:
        self.config = config
        self.workers = workers
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.rewards = rewards
        self.environment = environment
        self.model = model
        self.max_turns = config.environment.max_turns
        self.corrects = any(stage.algorithm.correction != "none" for stage in config.stages)
        self.max_tokens = config.data.max_prompt_tokens + config.rollout.max_new_tokens

    def params(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        r = self.config.rollout
        return SamplingParams(temperature, r.max_new_tokens, self.eos_ids, top_p, top_k, tuple(r.stop), self.config.run.seed)

    def run(self, episodes: list[Episode], params: SamplingParams) -> Rollouts:
        """Lead new episodes to their end, and score them.

        Those that are `compared` come with the engine's log-probabilities; all do where a correction needs them.
        """
        self.workers.sync(self.workers.version)  # awake again, where a reward model took the memory
        tickets: dict[int, Ticket] = {}
        going, turn = episodes, 0
        while going:
            going, turn = self._turn(going, turn, params, tickets), turn + 1
        return Rollouts(episodes, self._scores(episodes, tickets))

    def go_on(self, episodes: Sequence[Episode], params: SamplingParams, limit: int) -> None:
        """Draw up to `params.max_new_tokens` more tokens of each reply, from those it has; at `limit` tokens in all it ends."""
        self.workers.sync(self.workers.version)
        requests = [Request(i, e.stream, e.key, True, len(e.begun.ids) if e.begun else 0) for i, e in enumerate(episodes)]
        for drawn in chain.from_iterable(self.workers.generate(requests, params)):
            episode = episodes[drawn.index]
            whole, episode.begun = after(episode.begun, drawn) if episode.begun else drawn, None
            cut = drawn.finish_reason == "length" and len(drawn.ids) == params.max_new_tokens
            if cut and len(whole.ids) < limit:
                episode.begun = whole
            else:
                self.ended(episode, whole)

    def ended(self, episode: Episode, reply: Completion) -> None:
        """Take in an episode's whole and only reply."""
        episode.reply(reply, self.tokenizer.decode(reply.ids, skip_special_tokens=True), len(reply.ids))

    def scored(self, episodes: list[Episode]) -> Rollouts:
        """Episodes that have ended, with their scores."""
        tickets: dict[int, Ticket] = {}
        self._submit(episodes, tickets)
        return Rollouts(episodes, self._scores(episodes, tickets) if episodes else [])

    def _turn(
        self, episodes: Sequence[Episode], turn: int, params: SamplingParams, tickets: dict[int, Ticket]
    ) -> list[Episode]:
        """One reply of each, and what the environment says to it: those that go on. The others begin to be scored."""
        room = [self.max_tokens - len(e.stream) for e in episodes]
        params = replace(params, max_new_tokens=min(params.max_new_tokens, max(room)))
        requests = [Request(i, e.stream, f"{e.key}|turn {turn}" if turn else e.key, e.compared or self.corrects)
                    for i, e in enumerate(episodes)]
        asked: dict[int, Ticket] = {}
        for finished in self.workers.generate(requests, params):
            for c in finished:
                text = self.tokenizer.decode(c.ids[: room[c.index]], skip_special_tokens=True)
                episodes[c.index].reply(c, text, room[c.index])
            here = [episodes[c.index] for c in finished]
            if self.environment is None:
                self._submit(here, tickets)
            else:
                asked.update(zip((c.index for c in finished), self.environment.submit([e.turn() for e in here]), strict=True))
        if self.environment is None:
            return []
        answers = self.environment.collect([asked[i] for i in range(len(episodes))])
        going = [e for e, answer in zip(episodes, answers, strict=True) if self._goes_on(e, answer, turn)]
        ended = {id(e) for e in episodes} - {id(e) for e in going}
        self._submit([e for e in episodes if id(e) in ended], tickets)
        return going

    def _goes_on(self, episode: Episode, answer: Score, turn: int) -> bool:
        """Take in the environment's answer (a plain Score where it failed); whether there is another turn."""
        episode.add_score(answer)
        if not isinstance(answer, Answer) or answer.done or episode.finish_reason != "stop":
            return False
        episode.state = answer.state
        ids = continuation(self.tokenizer, answer.messages, episode.stream[-1], self.eos_ids)
        if turn + 1 == self.max_turns or len(episode.stream) + len(ids) >= self.max_tokens:
            episode.finish_reason = "length"
            return False
        episode.parts.append(Part("environment", ids, (0.0,) * len(ids), self.tokenizer.decode(ids)))
        episode.messages += answer.messages
        return True

    def _submit(self, episodes: Sequence[Episode], tickets: dict[int, Ticket]) -> None:
        if self.rewards is not None:
            tickets.update(zip(map(id, episodes), self.rewards.submit([e.item() for e in episodes]), strict=True))

    def _scores(self, episodes: Sequence[Episode], tickets: dict[int, Ticket]) -> list[Score]:
        """Each episode's score: the environment's, the reward pool's and the reward model's, added up."""
        sources = [[e.score] if e.score else [] for e in episodes]
        if self.rewards is not None:
            pooled = dict(zip(tickets, self.rewards.collect(list(tickets.values())), strict=True))
            for e, scores in zip(episodes, sources, strict=True):
                scores.append(pooled[id(e)])
        if self.model is not None:
            # All has been generated. The engine's cache may hold most of a device's memory, which this forward needs.
            self.workers.sleep()
            for scores, score in zip(sources, self.model.score([e.item() for e in episodes], self.workers), strict=True):
                scores.append(score)
        return [combined(scores) for scores in sources]
