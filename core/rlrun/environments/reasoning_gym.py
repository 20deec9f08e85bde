"""reasoning-gym tasks as an environment of one turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlrun.data.sample import Messages
from rlrun.rewards.protocol import RewardItem
from rlrun.rewards.reasoning_gym import ReasoningGymReward


class ReasoningGymEnvironment:
    """The dataset's own scorer, as the reward `reasoning_gym` uses it, ends every episode after one reply."""

    def __init__(self, tag: str | None = None) -> None:
        self.score = ReasoningGymReward(tag)

    def reset(self, sample: RewardItem) -> RewardItem:
        return sample

    def step(self, state: RewardItem, messages: Messages) -> tuple[Messages, dict[str, Any], bool]:
        return [], self.score(replace(state, completion=messages[-1]["content"])), True
