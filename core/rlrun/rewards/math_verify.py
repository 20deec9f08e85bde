"""Reward from mathematical equality of the answers, by the library math_verify."""

import logging
from typing import Any

from rlrun.rewards.protocol import RewardItem


class MathVerifyReward:
    """1 where the completion's final answer equals the reference, else 0.

    A reference is LaTeX or plain (1/3, \\frac{1}{3}, 42, $x+1$). Of one with `marker` in it only what follows counts,
    as in GSM8K ("... #### 42"), and likewise of a completion without \\boxed. A reference that cannot be read is an error.
    The pool keeps the time: math_verify's own limits need signals, so they are off, and the reward works in any thread."""

    def __init__(self, marker: str = "####") -> None:
        import math_verify

        self.library, self.marker = math_verify, marker
        # the library warns, once a process, that its time limits are off
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, item: RewardItem) -> dict[str, Any]:
        parse, verify = self.library.parse, self.library.verify
        reference = str(item.answer).rpartition(self.marker)[2].strip()
        gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=None) if "\\boxed" not in reference else []
        gold = gold or parse(reference, parsing_timeout=None)
        if not gold:
            raise ValueError(f"math_verify cannot read the reference answer {item.answer!r}")
        said = item.completion if "\\boxed" in item.completion else item.completion.rpartition(self.marker)[2]
        answer = parse(said, parsing_timeout=None)
        score = float(verify(gold, answer, timeout_seconds=None))
        return {"score": score, "correct": score, "pred": str(answer[0]) if answer else ""}
