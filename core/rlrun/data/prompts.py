"""From rows to samples: the chat template, once; over-long prompts; training data kept apart from validation data."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase

from rlrun.config.schema import DataConfig, SourceConfig
from rlrun.data.sample import Messages, Row, Sample
from rlrun.plugins import Plugins

CHUNK = 1000  # rows rendered and tokenized together
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Samples:
    """All data of a run."""

    train: list[list[Sample]]  # by source, in the order of `data.train`
    validation: list[Sample]
    counts: dict[str, int] = field(default_factory=dict)
    """rows read, dropped and truncated (over-long), in_validation (left the training data)."""

    @property
    def notices(self) -> list[str]:
        """What a user should know of the data, as lines."""
        said = {"dropped": "longer than data.max_prompt_tokens, dropped", "truncated": "longer than "
                "data.max_prompt_tokens, truncated", "in_validation": "of training left out: also in validation"}
        sizes = ", ".join(str(len(source)) for source in self.train)
        return [f"{sizes} training prompts (by source), {len(self.validation)} validation prompts",
                *(f"{self.counts[name]} prompts {text}" for name, text in said.items() if self.counts.get(name))]


def load_data(data: DataConfig, tokenizer: PreTrainedTokenizerBase, plugins: Plugins) -> Samples:
    """Read and tokenize all sources. Raises ValueError for a bad row, or a source of which nothing is left.

    Training rows whose prompt text is in the validation data are left out, so validation questions are unseen."""
    counts: Counter[str] = Counter()
    validation = [sample for config in data.validation for sample in _samples(config, data, tokenizer, plugins, counts, set())]
    unseen = {_text(sample.prompt) for sample in validation}
    train = [_samples(config, data, tokenizer, plugins, counts, unseen) for config in data.train]
    for part, samples in (("train", [s for source in train for s in source]), ("validation", validation)):
        twice = [uid for uid, count in Counter(s.uid for s in samples).items() if count > 1]
        if twice:
            raise ValueError(f"two sources of data.{part} both have a row {twice[0]!r}: give one another `name`")
    return Samples(train, validation, dict(counts))


def _samples(config: SourceConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, plugins: Plugins, counts: Counter[str],
             unseen: set[str]) -> list[Sample]:
    here: Counter[str] = Counter()

    def wanted() -> Iterator[Row]:
        for row in plugins.resolve("source", config.kind)(config).rows():
            here["rows"] += 1
            if _text(row.prompt) in unseen:
                here["in_validation"] += 1
            else:
                yield row

    samples = []
    for row, ids in encoded(wanted(), lambda rows: encode_prompts(tokenizer, [r.prompt for r in rows]), lambda row: row.origin):
        if not ids:
            raise ValueError(f"{row.origin}: the prompt has no tokens")
        if len(ids) > data.max_prompt_tokens:
            shortened = shorten(ids, data.max_prompt_tokens, data.overlong_prompts, row.origin)
            here["dropped" if shortened is None else "truncated"] += 1
            if shortened is None:
                continue
            ids = shortened
        samples.append(Sample(row.uid, row.prompt, tuple(ids), row.answer, row.data_source, row.extra))
    counts.update(here)
    if not samples:
        raise ValueError(
            f"data source {config.path} has no row to use: {here['rows']} rows, of which {here['dropped']} are longer than "
            f"data.max_prompt_tokens={data.max_prompt_tokens} and {here['in_validation']} are validation prompts")
    return samples


def encoded(rows: Iterable[T], encode: Callable[[list[T]], list[R]], name: Callable[[T], str]) -> Iterator[tuple[T, R]]:
    """Rows with what `encode` makes of them, many at a time, which is faster. Raises ValueError naming the row at fault."""
    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        try:
            results = encode(chunk)
        except (jinja2.TemplateError, ValueError):
            results = [_encoded_alone(row, encode, name) for row in chunk]
        yield from zip(chunk, results, strict=True)


def _encoded_alone(row: T, encode: Callable[[list[T]], list[R]], name: Callable[[T], str]) -> R:
    try:
        return encode([row])[0]
    except (jinja2.TemplateError, ValueError) as error:
        raise ValueError(f"{name(row)}: {error}") from error


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Messages]) -> list[list[int]]:
    """Each prompt's ids, as rollout and trainer use them.

    With a chat template, a text becomes one user message, and the template opens the assistant's turn. Without one, a
    text is encoded as it stands (no token is added: one that begins the text must be written in the data), and a list
    of messages is a ValueError."""
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        return list(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("the prompt is a list of chat messages, but the tokenizer has no chat template: "
                         "use model.tokenizer with one, or prompts that are texts")
    return list(tokenizer(list(prompts), add_special_tokens=False)["input_ids"])


def encode_answers(tokenizer: PreTrainedTokenizerBase, answers: Sequence[Any]) -> list[list[int]]:
    """Ids of reference answers as completions: each text's own tokens and the end-of-sequence token.

    A list with one message of the assistant counts as its text."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so a model cannot learn to stop")
    texts = [_answer_text(answer) for answer in answers]
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _answer_text(answer: Any) -> str:
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], Mapping) and answer[0].get("role") == "assistant":
        answer = answer[0].get("content")
    if not isinstance(answer, str | int | float):
        raise ValueError(f"supervised training needs answers that are texts; this one is {answer!r}")
    return str(answer)


def shorten(ids: Sequence[int], limit: int, how: str, origin: str) -> list[int] | None:
    """At most `limit` ids; None: drop the row. truncate_left keeps the last, _right the first, _middle both ends."""
    if how == "drop":
        return None
    if how == "error":
        raise ValueError(f"{origin}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens={limit}: raise "
                         "it, or set data.overlong_prompts to drop or one of truncate_left, _right, _middle")
    head = {"truncate_left": 0, "truncate_right": limit, "truncate_middle": limit // 2}[how]
    return [*ids[:head], *ids[len(ids) - (limit - head):]]


def _text(prompt: str | Messages) -> str:
    """What makes two prompts the same question; a text is the same as one user message."""
    if not isinstance(prompt, str) and len(prompt) == 1 and prompt[0]["role"] == "user":
        prompt = prompt[0]["content"]
    return prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
