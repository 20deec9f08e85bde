"""A reward that looks at the length alone."""

from __future__ import annotations

from rlrun.rewards.protocol import RewardItem


class Short:
    """1 for a completion of at most `characters`, less for longer ones. Made once in each scoring process."""

    def __init__(self, characters: int = 4) -> None:
        self.characters = characters

    def __call__(self, item: RewardItem) -> float:
        return min(1.0, self.characters / max(len(item.completion), 1))
