"""Reward from a model: a sequence classifier with one output, frozen, on the ranks as role `rm`."""

import math
from collections.abc import Sequence

from rlrun.batch import Batch
from rlrun.config.schema import Config
from rlrun.models.folder import load_config, load_tokenizer
from rlrun.rewards.pool import MODEL, OnError
from rlrun.rewards.protocol import RewardItem, Score
from rlrun.workers.group import WorkerGroup
from rlrun.workers.protocol import RoleRequest

ROLE = "rm"


class RewardModel:
    """Scores conversations with the model of folder `path` (AutoModelForSequenceClassification with num_labels 1).

    Each conversation is rendered with that folder's own chat template and tokenizer (without a template, prompt and
    completion are one text). The score is the output at the last token, as transformers computes it. One longer than
    `max_tokens` (default and limit: what fits actor.tokens_per_micro_batch) is an error, dealt with by reward.on_error."""

    def __init__(self, config: Config, weight: float, path: str, max_tokens: int | None = None) -> None:
        self.weight = weight
        self.errors = OnError(config.reward.on_error)
        model = load_config(path)
        if model.num_labels != 1:
            raise ValueError(f"reward model {path} has {model.num_labels} outputs; a reward model has 1 (num_labels)")
        self.pad = model.pad_token_id
        self.tokenizer = load_tokenizer(path)
        self.request = RoleRequest(trainable=False, path=path, dtype=config.model.dtype, head="score")
        room = config.actor.tokens_per_micro_batch - 1
        self.max_tokens = room if max_tokens is None else max_tokens
        if not 0 < self.max_tokens <= room:
            raise ValueError(f"the reward model's max_tokens = {max_tokens} must be at most {room}: "
                             "actor.tokens_per_micro_batch less 1")

    def score(self, items: Sequence[RewardItem], workers: WorkerGroup) -> list[Score]:
        """The scores, by one forward pass over all items, spread over the ranks. Their `reward` is weighted."""
        errors: dict[int, str] = {}
        rows: dict[int, list[int]] = {}
        for i, item in enumerate(items):
            try:
                rows[i] = self.encode(item)
            except Exception as error:  # noqa: BLE001 - a template may raise anything, and this sample alone is at fault
                errors[i] = " ".join(f"{MODEL}: {type(error).__name__}: {error}".split())
        values = dict(zip(rows, self._forward(list(rows.values()), workers), strict=True))
        errors |= {i: f"{MODEL}: the score is {x}" for i, x in values.items() if not math.isfinite(x)}
        scores = [Score(0.0, 0.0, error=errors[i]) if i in errors else
                  Score(self.weight * values[i], values[i], {MODEL: values[i]}) for i in range(len(items))]
        return [self.errors.settle(score, "", item) for score, item in zip(scores, items, strict=True)]

    def encode(self, item: RewardItem) -> list[int]:
        """The conversation's tokens. Raises ValueError for one that is too long, or that the template cannot render."""
        if self.tokenizer.chat_template:
            prompt = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
            talk = [*prompt, {"role": "assistant", "content": item.completion}]
            ids = list(self.tokenizer.apply_chat_template(talk, return_dict=False))
        elif isinstance(item.prompt, str):
            ids = list(self.tokenizer(item.prompt + item.completion)["input_ids"])
        else:
            raise ValueError("the prompt is a list of chat messages, but the reward model's tokenizer has no chat template")
        while len(ids) > 1 and ids[-1] == self.pad:  # transformers takes the last token that is no padding
            ids.pop()
        if not 0 < len(ids) <= self.max_tokens:
            raise ValueError(f"the conversation has {len(ids)} tokens; max_tokens is {self.max_tokens}")
        return ids

    def _forward(self, rows: Sequence[list[int]], workers: WorkerGroup) -> list[float]:
        """The output at each row's last token: the value before one more token, whichever that is."""
        if not rows:
            return []
        batch = Batch.from_sequences([{"ids": [*ids, ids[-1]], "loss_mask": [False] * len(ids) + [True]} for ids in rows])
        values = workers.forward(ROLE, batch, {"values"}, 1.0)["values"]
        return [float(x) for x in values[batch.tokens["loss_mask"]]]
