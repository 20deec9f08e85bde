"""Conversations as token streams: what the policy drew is kept token by token, what is put between is encoded alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jinja2

from rlrun.data.sample import Messages, Sample
from rlrun.environments.protocol import Turn
from rlrun.errors import RunError
from rlrun.rewards.protocol import RewardItem, Score
from rlrun.rollout.protocol import Completion, FinishReason


class Part(NamedTuple):
    """A stretch of an episode's tokens after the prompt."""

    by: Literal["policy", "environment"]
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # of the policy's tokens, as drawn, NaN where the engine was not asked; 0 for the environment's
    text: str


@dataclass
class Episode:
    """One sample's way through generation: a prompt and the policy's reply, or several with an environment between."""

    group: int
    sample: Sample
    key: str  # names the random stream; every further turn has its own
    compared: bool = False  # whether the engine's log-probabilities are compared with the trainer's
    parts: list[Part] = field(default_factory=list)
    messages: Messages = field(default_factory=list)  # the conversation after the prompt
    finish_reason: FinishReason = "length"
    policy_version: int = -1
    begun: Completion | None = None  # what was drawn of a reply that is to go on
    older: int = 0  # how many of the first tokens after the prompt an older policy drew than the others
    state: Any = None  # the environment's
    score: Score | None = None  # the environment's rewards so far

    @property
    def ids(self) -> list[int]:
        """All tokens after the prompt."""
        return [i for part in self.parts for i in part.ids]

    @property
    def log_probs(self) -> list[float]:
        return [x for part in self.parts for x in part.log_probs]

    @property
    def loss_mask(self) -> list[bool]:
        """Whether the policy drew each token of `ids`."""
        return [part.by == "policy" for part in self.parts for _ in part.ids]

    @property
    def stream(self) -> tuple[int, ...]:
        """The prompt's tokens and all after them: what the engine goes on from."""
        return (*self.sample.prompt_ids, *self.ids, *(self.begun.ids if self.begun else ()))

    def reply(self, completion: Completion, text: str, room: int) -> None:
        """Take in what the policy drew: at most `room` tokens of it."""
        cut = len(completion.ids) > room
        log_probs = completion.log_probs or (math.nan,) * len(completion.ids)
        self.parts.append(Part("policy", completion.ids[:room], log_probs[:room], text))
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reason = "length" if cut else completion.finish_reason
        self.policy_version = completion.policy_version

    def item(self) -> RewardItem:
        """What rewards see: the policy's last reply, and what came before it as the prompt."""
        s = self.sample
        prompt = s.prompt if len(self.messages) == 1 else self._conversation()[:-1]
        return RewardItem(prompt, self.messages[-1]["content"], s.answer, s.data_source, s.extra)

    def turn(self) -> Turn:
        """What the environment sees."""
        s = self.sample
        return Turn(s.prompt, self.messages[-1]["content"], s.answer, s.data_source, s.extra, self._conversation(),
                    self.state, len(self.messages) == 1)

    def add_score(self, step: Score) -> None:
        """Add a step's reward to those before; all else is the last step's."""
        if step.error is not None:
            self.score = step
            return
        assert step.reward is not None
        total = step.reward + ((self.score.reward if self.score else None) or 0.0)
        self.score = Score(total, step.correct, {"environment": total, **step.parts}, step.pred)

    def _conversation(self) -> Messages:
        prompt = self.sample.prompt
        first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return [*first, *self.messages]


def after(begun: Completion, drawn: Completion) -> Completion:
    """What was drawn as the rest of a completion, as one; its version is that of the policy that began it."""
    ids, log_probs = begun.ids + drawn.ids, begun.log_probs + drawn.log_probs
    return replace(drawn, ids=ids, log_probs=log_probs, policy_version=begun.policy_version)


_REPLY = "\u2983reply\u2984"  # stands for a reply in a conversation that is rendered to see what the template puts after one


def continuation(tokenizer: Any, messages: Messages, last: int, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens between a reply whose last token is `last` and the next one: the end of the reply's message where the policy
    did not draw it, the new messages, the opening of the assistant's turn.

    Without a chat template, the messages' texts as they stand. Raises RunError where the template cannot say."""
    if not tokenizer.chat_template:
        return tuple(tokenizer("".join(m["content"] for m in messages), add_special_tokens=False)["input_ids"])
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _REPLY}, *messages]
    try:
        text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError as error:
        raise RunError(f"the chat template cannot render the environment's messages {messages}: {error}") from error
    _, found, after = text.partition(_REPLY)
    if not found:
        raise RunError("the chat template leaves out an assistant message that others follow: no environment can answer it")
    ids = tuple(tokenizer(after, add_special_tokens=False)["input_ids"])
    return ids[1:] if last in eos_ids and ids[:1] == (last,) else ids


def combined(scores: Sequence[Score]) -> Score:
    """Several sources' scores as one: rewards and parts add up, `correct` and `pred` are the first's."""
    first = scores[0]
    for score in scores[1:]:
        reward = None if first.reward is None or score.reward is None else first.reward + score.reward
        first = replace(first, reward=reward, parts={**first.parts, **score.parts}, pred=first.pred or score.pred,
                        error=first.error or score.error)
    return first
