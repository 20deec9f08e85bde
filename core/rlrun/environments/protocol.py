"""What an environment implements: answers to what the policy says, until an episode is over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlrun.data.sample import Messages
from rlrun.rewards.protocol import RewardItem, Score


class Environment(Protocol):
    """An environment: a class that `provides` names, made once in each of its processes from `environment.kwargs`.

    It serves all episodes and keeps nothing of them: an episode's state travels with it, and a step may be called in
    any process, or again where a process died. Both methods may be coroutines. They have reward.timeout_s for one call,
    and exceptions are dealt with as reward.on_error says."""

    def reset(self, sample: RewardItem) -> Any:
        """An episode's state: plain data that can be pickled, or None. `sample` has prompt, answer, data_source, extra."""

    def step(self, state: Any, messages: Messages) -> tuple[Messages, float | Mapping[str, Any], bool]:
        """React to a conversation whose last message is the policy's: (new messages, reward, whether this is the end).

        `state` may be changed in place. New messages, such as {"role": "tool", "content": "84"}, go to the policy; at the
        end there need be none. Rewards of an episode's steps are added up; one may also be a mapping, as a reward may
        return (`Reward`), whose further entries count at the last step."""


@dataclass(frozen=True)
class Turn(RewardItem):
    """A step that an environment is asked for; `completion` is what the policy said last."""

    messages: Messages = field(default_factory=list)
    state: Any = None
    first: bool = True


@dataclass(frozen=True)
class Answer(Score):
    """What came of it. `correct` is what the step returned as that, else its reward."""

    messages: Messages = field(default_factory=list)
    done: bool = True
    state: Any = None
