"""What becomes of samples that could not be scored."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from rlrun.rewards.protocol import RewardItem, Score

log = logging.getLogger(__name__)


class OnError:
    """`reward.on_error`: reward 0, no reward, or the run's end. Errors are named in the log once a kind, and counted."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.counts: Counter[str] = Counter()
        """Samples by kind of error, since the start."""

    def settle(self, score: Score, trace: str, item: RewardItem) -> Score:
        """The score that counts. `trace` is the error's traceback, "" where there is none."""
        if score.error is None:
            return score
        kind = score.error.split(": ")[0] if trace == "" else ": ".join(score.error.split(": ")[:2])
        self.counts[kind] += 1
        what = f"reward of a {item.data_source} sample: {score.error}; the completion begins {item.completion[:80]!r}"
        if self.how == "raise":
            raise RuntimeError(f"{what} (reward.on_error is raise)\n{trace}")
        if self.counts[kind] == 1:
            log.warning("%s. Such samples %s (reward.on_error). Further ones are counted, not named.\n%s", what,
                        "get reward 0" if self.how == "zero" else "are dropped", trace)
        return score if self.how == "zero" else replace(score, reward=None)
