"""What a reward implements: a score for one completion."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RewardItem:
    """What a reward sees of one sample. Plain data: it crosses to a scoring process."""

    prompt: str | list[dict[str, Any]]
    completion: str  # decoded text of the completion, without special tokens
    answer: Any
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)


class Reward(Protocol):
    """A reward: a class that `provides` names, made once in each scoring process from `reward.kwargs`."""

    def __call__(self, item: RewardItem) -> float | Mapping[str, Any]:
        """A finite score; or {"score": ..., "correct": 0 to 1, further numbers to log, "pred": answer for maj@n}."""


@dataclass(frozen=True)
class Score:
    """The outcome of scoring one sample."""

    reward: float | None  # weighted sum of the parts; None: drop the sample (reward.on_error: drop)
    correct: float
    """What validation and filters count as accuracy: "correct" of the first part that gives it, else the first part's
    unweighted score."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted score of each part, and the further numbers it returned, as "part" and "part/name"."""
    pred: str | None = None
    error: str | None = None  # exception or time-out, as one line; None where scoring went well
