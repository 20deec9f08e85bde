"""From rows to samples: the chat template, once; over-long prompts; training data kept apart from validation data."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlrun.config.schema import DataConfig, SourceConfig
from rlrun.data.sample import Messages, Row, Sample
from rlrun.plugins import Plugins


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

    def keep(row: Row) -> Iterator[Sample]:
        here["rows"] += 1
        if _text(row.prompt) in unseen:
            here["in_validation"] += 1
            return
        try:
            ids = encode_prompt(tokenizer, row.prompt)
        except (jinja2.TemplateError, ValueError) as error:
            raise ValueError(f"{row.origin}: {error}") from error
        if not ids:
            raise ValueError(f"{row.origin}: the prompt has no tokens")
        if len(ids) > data.max_prompt_tokens:
            shortened = shorten(ids, data.max_prompt_tokens, data.overlong_prompts, row.origin)
            here["dropped" if shortened is None else "truncated"] += 1
            if shortened is None:
                return
            ids = shortened
        yield Sample(row.uid, row.prompt, tuple(ids), row.answer, row.data_source, row.extra)

    samples = [sample for row in plugins.resolve("source", config.kind)(config).rows() for sample in keep(row)]
    counts.update(here)
    if not samples:
        raise ValueError(
            f"data source {config.path} has no row to use: {here['rows']} rows, of which {here['dropped']} are longer than "
            f"data.max_prompt_tokens={data.max_prompt_tokens} and {here['in_validation']} are validation prompts")
    return samples


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> list[int]:
    """The prompt's ids, as rollout and trainer use them.

    With a chat template, a text becomes one user message, and the template opens the assistant's turn. Without one, a
    text is encoded as it stands (no token is added: one that begins the text must be written in the data), and a list
    of messages is a ValueError."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    if not isinstance(prompt, str):
        raise ValueError("the prompt is a list of chat messages, but the tokenizer has no chat template: "
                         "use model.tokenizer with one, or prompts that are texts")
    return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: Any) -> list[int]:
    """Ids of a reference answer as a completion: the text's own tokens and the end-of-sequence token.

    A list with one message of the assistant counts as its text."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], Mapping) and answer[0].get("role") == "assistant":
        answer = answer[0].get("content")
    if not isinstance(answer, str | int | float):
        raise ValueError(f"supervised training needs answers that are texts; this one is {answer!r}")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so a model cannot learn to stop")
    return [*tokenizer(str(answer), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


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
