"""What a rollout engine implements: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlrun.config.schema import Config

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Temperature 0 is greedy."""

    temperature: float
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One completion to draw. `key` names the random stream: the same key draws the same noise, wherever it runs."""

    index: int
    """The caller's number for this request, returned with the completion."""
    prompt_ids: tuple[int, ...]
    key: str
    log_probs: bool = True
    """Whether the completion must carry its log-probabilities; engines that pay for them leave them out otherwise."""
    drawn: int = 0
    """How many of the last `prompt_ids` were drawn under this key before: the completion goes on after them."""


@dataclass(frozen=True)
class Completion:
    """A drawn completion: its true length, with the end-of-sequence token where one was drawn."""

    index: int
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of each id, under the distribution it was drawn from (temperature, top_p and top_k applied); greedy: at temperature 1.
    May be empty where the request did not ask for them."""
    finish_reason: FinishReason
    policy_version: int


class Rollout(Protocol):
    """An engine in one rank. It owns its weights, which come only through `load_weights`."""

    policy_version: int
    """Version of the weights, counted only after they were loaded whole; -1 before the first."""

    def __init__(self, config: Config, device: torch.device, rank: int) -> None: ...

    @staticmethod
    def ranks_per_engine(config: Config) -> int:
        """How many neighbouring ranks form one engine; they are given the same requests. Import-light, on the driver too."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Draw completions, in any order. Raises RuntimeError before the first weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights, under save_pretrained's names. Raises ValueError for a name unmatched on either side."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory again: first the weights', then the cache's."""

    def sleep(self) -> None:
        """Give device memory back between generations."""

    def close(self) -> None:
        """Let go of everything, while the process groups still exist."""
