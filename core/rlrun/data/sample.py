"""One prompt with its reference answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One row of a source, before tokenization."""

    uid: str  # names the row in its source, for good: "source/number"
    prompt: str | Messages
    answer: Any
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)  # what rewards may want besides: the source's further columns
    origin: str = ""  # where the row stands, for messages: "train.jsonl, row 17"


@dataclass(frozen=True)
class Sample:
    """A row with the ids that rollout and trainer both use."""

    uid: str
    prompt: str | Messages
    prompt_ids: tuple[int, ...]
    answer: Any
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
