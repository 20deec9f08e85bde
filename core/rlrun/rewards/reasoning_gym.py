"""Reward from the scorer of the reasoning-gym dataset that a sample comes from, and the same as an environment of one turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlrun.data.sample import Messages
from rlrun.rewards.protocol import RewardItem


class ReasoningGymReward:
    """The dataset's `score_answer`, between 0 and 1; only a full 1 counts as correct.

    The answer is the whole completion, or what stands in its last <tag>...</tag> where `tag` is given (nothing there:
    no answer). Needs samples of the source `reasoning_gym`, or rows with reasoning-gym's own columns question, answer
    and metadata (with source_dataset in it)."""

    def __init__(self, tag: str | None = None) -> None:
        # here and not in the module or the call: loading takes seconds, and a call has a time limit
        import reasoning_gym
        from reasoning_gym.utils import extract_answer

        self.tag, self.extract, self.make_scorer = tag, extract_answer, reasoning_gym.get_score_answer_fn
        self.scorers: dict[str, Callable[..., float]] = {}

    def __call__(self, item: RewardItem) -> dict[str, Any]:
        if "reasoning_gym" in item.extra:
            dataset, entry = item.extra["reasoning_gym"]["dataset"], item.extra["reasoning_gym"]["entry"]
        elif "source_dataset" in (metadata := item.extra.get("metadata") or {}):
            dataset = metadata["source_dataset"]
            entry = {"question": item.prompt, "answer": item.answer, "metadata": metadata}
        else:
            raise ValueError("not a sample of reasoning_gym: it has neither an entry nor metadata.source_dataset")
        if dataset not in self.scorers:
            self.scorers[dataset] = self.make_scorer(dataset)
        answer = self.extract(item.completion, self.tag) if self.tag else item.completion.strip()
        score = float(self.scorers[dataset](answer, entry))
        return {"score": score, "correct": float(score >= 1), "pred": answer or ""}


class ReasoningGymEnvironment:
    """The dataset's own scorer, ends every episode after one reply."""

    def __init__(self, tag: str | None = None) -> None:
        self.score = ReasoningGymReward(tag)

    def reset(self, sample: RewardItem) -> RewardItem:
        return sample

    def step(self, state: RewardItem, messages: Messages) -> tuple[Messages, dict[str, Any], bool]:
        return [], self.score(replace(state, completion=messages[-1]["content"])), True
