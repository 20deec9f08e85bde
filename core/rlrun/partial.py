"""Partial rollouts: long completions do not hold up a step, but go on in the next ones (Kimi k1.5, arXiv 2501.12599, 2.6.2)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from rlrun.batch import from_text, to_text
from rlrun.data.sample import Sample
from rlrun.environments.turns import Episode
from rlrun.generation import Generator, Rollouts
from rlrun.metrics import Value
from rlrun.rollout.protocol import Completion, SamplingParams


class PartialRollouts:
    """Episodes on their way: each round draws up to `tokens` more of every reply that has not ended.

    What was drawn stays as it is, with the log-probabilities and the version of the policy that drew it. A prompt's samples
    wait for one another, and prompts that are complete are handed out oldest first."""

    def __init__(self, generator: Generator, tokens: int, limit: int) -> None:
        self.generator = generator
        self.tokens = tokens
        self.limit = limit
        self.episodes: list[Episode] = []

    def new_policy(self) -> None:
        """Say that all tokens so far are of an older policy."""
        for e in self.episodes:
            e.older = len(e.begun.ids if e.begun else e.ids)

    @property
    def complete(self) -> list[int]:
        """Groups that wait for no sample, oldest first."""
        going = {e.group for e in self.episodes if not e.parts}
        return [group for group in Counter(e.group for e in self.episodes) if group not in going]

    def run(self, episodes: Iterable[Episode], params: SamplingParams, most: int) -> Rollouts:
        """A round with further episodes. Hands out up to `most` groups, scored."""
        self.episodes += episodes
        going = [e for e in self.episodes if not e.parts]
        if going:
            self.generator.go_on(going, replace(params, max_new_tokens=self.tokens), self.limit)
        out = set(self.complete[:most])
        done = [e for e in self.episodes if e.group in out]
        self.episodes = [e for e in self.episodes if e.group not in out]
        return self.generator.scored(done)

    def metrics(self) -> dict[str, Value]:
        """What the next step takes over: replies to go on with, and those that wait."""
        going = sum(not e.parts for e in self.episodes)
        return {"rollout/carried": Value(going, None, "sum"), "rollout/waiting": Value(len(self.episodes) - going, None, "sum")}

    def state(self) -> str:
        """All episodes, as text."""
        rows = []
        for e in self.episodes:
            ids, log_probs = (e.begun.ids, e.begun.log_probs) if e.begun else (e.ids, e.log_probs)
            version = e.begun.policy_version if e.begun else e.policy_version
            rows.append({"group": e.group, "uid": e.sample.uid, "key": e.key, "compared": e.compared, "version": version,
                         "ended": e.finish_reason if e.parts else "", "ids": torch.tensor(ids),
                         "log_probs": torch.tensor(log_probs, dtype=torch.float64)})
        return to_text(rows)

    def load(self, state: str, samples: Iterable[Sample]) -> None:
        """Take back what `state` returned, with the training data's samples."""
        by_uid = {s.uid: s for s in samples}
        rows: list[dict[str, Any]] = from_text(state)
        for row in rows:
            episode = Episode(row["group"], by_uid[row["uid"]], row["key"], row["compared"])
            begun = Completion(0, tuple(row["ids"].tolist()), tuple(row["log_probs"].tolist()), row["ended"] or "length",
                               row["version"])
            if row["ended"]:
                self.generator.ended(episode, begun)
            else:
                episode.begun = begun
            self.episodes.append(episode)
