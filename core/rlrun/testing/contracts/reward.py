"""What holds for every reward: numbers in processes of their own, which load nothing heavy and keep no memory of samples."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rlrun.config.schema import RewardConfig
from rlrun.plugins import Plugins
from rlrun.rewards.pool import RewardPool, part_specs
from rlrun.rewards.protocol import RewardItem, Score
from rlrun.testing.contracts.base import Contract

TOLERANCE = 1e-9
LIMIT_S = 10.0
"""Time that one sample may take."""


class RewardContract(Contract):
    """The suite for a reward that `plugins` provides."""

    reward: ClassVar[str]
    kwargs: ClassVar[Mapping[str, Any]] = {}
    """`reward.kwargs`: what the class is made with."""
    examples: ClassVar[Sequence[tuple[RewardItem, float]]]
    """Samples and the scores that they must have, of which two differ."""

    @classmethod
    def make(cls) -> RewardPool:
        plugins = Plugins.load(cls.plugins)
        config = RewardConfig(kind=cls.reward, kwargs=dict(cls.kwargs), timeout_s=LIMIT_S)
        return RewardPool(config, part_specs(config, plugins.provided("reward")), plugins.files())

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[RewardPool]:
        pool = cls.make()
        yield pool
        pool.close()

    def test_scores(self, pool: RewardPool) -> None:
        """The expected scores, in whatever order samples come, and again; without errors."""
        assert len({score for _, score in self.examples}) > 1, "give examples with different scores"
        items = [item for item, _ in self.examples]
        first = pool.score(items)
        assert [score.error for score in first] == [None] * len(items)
        assert [score.reward for score in first] == pytest.approx([score for _, score in self.examples], abs=TOLERANCE)
        assert pool.score(items[::-1])[::-1] == first

    def test_odd_completions(self, pool: RewardPool) -> None:
        """Nothing, blanks and other scripts are completions too: each gets a score, or an error that is counted."""
        item = self.examples[0][0]
        odd = [replace(item, completion=text) for text in ("", " \n", "漢字🙂", "\\boxed{")]
        for score in pool.score(odd):
            assert isinstance(score, Score)
            assert score.error is None, f"{score.error}: return a score for a completion that cannot be read"

    def test_in_this_process(self) -> None:
        """The class takes `kwargs`, answers with a number or a mapping of "score" and more, and its answers pickle."""
        reward = Plugins.load(self.plugins).resolve("reward", self.reward)(**self.kwargs)
        for item, expected in self.examples:
            answer = reward(item)
            score = answer["score"] if isinstance(answer, Mapping) else answer
            assert float(score) == pytest.approx(expected, abs=TOLERANCE)
            assert pickle.loads(pickle.dumps(answer)) == answer
