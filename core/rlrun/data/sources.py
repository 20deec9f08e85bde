"""Where prompts come from: files, Hugging Face datasets on disk, reasoning-gym generators. All end as `Row`s."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlrun.config.schema import SourceConfig
from rlrun.data.sample import Row


class Source(Protocol):
    """A source: a class that `provides` names. Rows are the same, in the same order, every time."""

    def __init__(self, config: SourceConfig) -> None: ...

    def rows(self) -> Iterator[Row]:
        """All rows. Raises ValueError, naming file and row (the first is row 1), for one that is no use."""


class _Records:
    """A source of records with columns, numbered from 1."""

    options: tuple[str, ...] = ()

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        if unknown := set(config.options) - set(self.options):
            raise ValueError(f"data source {config.path}: kind {config.kind} has no options {', '.join(sorted(unknown))}; "
                             f"it has {', '.join(self.options) or 'none'}")

    def rows(self) -> Iterator[Row]:
        path = Path(self.config.path)
        if not path.exists():
            raise ValueError(f"data source {self.config.kind}: there is no {path.absolute()}")
        for number, record in self.records(path):
            yield to_row(self.config, record, number)

    def records(self, path: Path) -> Iterator[tuple[int, Any]]:
        raise NotImplementedError


class Jsonl(_Records):
    """One JSON object a line; blank lines are skipped."""

    def records(self, path: Path) -> Iterator[tuple[int, Any]]:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, row {number}: not a line of JSON ({error})") from error


class Parquet(_Records):
    """A parquet file, or a folder of them in order of name; nested columns become plain lists and dicts."""

    def records(self, path: Path) -> Iterator[tuple[int, Any]]:
        import pyarrow.parquet as pq

        files = sorted(path.glob("**/*.parquet")) if path.is_dir() else [path]
        groups = ((file, group) for file in map(pq.ParquetFile, files) for group in range(file.num_row_groups))
        return enumerate((record for file, group in groups for record in file.read_row_group(group).to_pylist()), 1)


class Datasets(_Records):
    """A folder that Hugging Face `save_to_disk` wrote; for a DatasetDict `options.split` says which part."""

    options = ("split",)

    def records(self, path: Path) -> Iterator[tuple[int, Any]]:
        import datasets

        dataset = datasets.load_from_disk(str(path))
        if isinstance(dataset, datasets.DatasetDict):
            split = self.config.options.get("split")
            if split not in dataset:
                raise ValueError(f"{path} has splits {sorted(dataset)}: options.split must name one (it is {split!r})")
            dataset = dataset[split]
        tables = dataset.with_format("arrow").iter(batch_size=1000)
        return enumerate((record for table in tables for record in table.to_pylist()), 1)


class ReasoningGym:
    """A reasoning-gym dataset: `path` is its name, `options` go to `reasoning_gym.create_dataset` (size, seed, ...);
    the seed is 0 by default.

    Every row carries its entry in `extra`, which the reward `reasoning_gym` scores with the dataset's own scorer."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        if (config.prompt_key, config.answer_key) != ("prompt", "answer"):
            raise ValueError(f"data source {config.path}: reasoning_gym has no columns for prompt_key and answer_key to name")

    def rows(self) -> Iterator[Row]:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        config, name = self.config, self.config.path
        if name not in DATASETS:
            raise ValueError(f"reasoning_gym has no dataset {name!r}; it has {', '.join(sorted(DATASETS))}")
        try:
            dataset = reasoning_gym.create_dataset(name, **{"seed": 0, **config.options})  # its own default is another every time
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"reasoning_gym dataset {name!r} with options {dict(config.options)}: {error}") from error
        for number, entry in enumerate(dataset, 1):
            yield Row(f"{config.name or name}/{number}", entry["question"], entry["answer"], config.name or name,
                      {"reasoning_gym": {"dataset": name, "entry": entry}}, f"{name}, row {number}")


def to_row(config: SourceConfig, record: Any, number: int) -> Row:
    """A source's record as a row: checked, its further columns in `extra`. `number` counts from 1.

    Where `answer_key` is "answer" and there is no such column, `reward_model.ground_truth` (verl's schema) is taken."""
    origin = f"{config.path}, row {number}"
    if not isinstance(record, Mapping):
        raise ValueError(f"{origin}: not an object with columns, but {type(record).__name__}")
    if config.prompt_key not in record:
        raise ValueError(f"{origin}: no column {config.prompt_key!r} for the prompt (data source's prompt_key); "
                         f"there is {', '.join(record)}")
    prompt = record[config.prompt_key]
    _check_prompt(prompt, origin)
    if media := [name for name in ("image", "images", "video", "videos") if record.get(name)]:
        raise ValueError(f"{origin}: the row has {', '.join(media)}, which data and rollout do not support: leave the column out "
                         "to train on the text alone")
    key = config.answer_key
    if key == "answer" and "answer" not in record and isinstance(record.get("reward_model"), Mapping):
        key = "reward_model.ground_truth"
    answer = _nested(record, key)
    if answer is None:
        raise ValueError(f"{origin}: no answer under {key!r} (data source's answer_key); there is {', '.join(record)}")
    label = config.name or Path(config.path).stem
    extra = {name: value for name, value in record.items() if name not in (config.prompt_key, key, "data_source")}
    return Row(f"{label}/{number}", prompt, answer, str(record.get("data_source") or label), extra, origin)


def _check_prompt(prompt: Any, origin: str) -> None:
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{origin}: the prompt must be a text or a list of chat messages, and not empty; it is {prompt!r}")
    for index, message in enumerate(prompt):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role:
            raise ValueError(f"{origin}: message {index} has no role: {message!r}")
        if not isinstance(message.get("content"), str | list) or message["content"] == []:
            raise ValueError(f"{origin}: message {index} ({role}) has no content: {message.get('content')!r}")
        parts = message["content"] if isinstance(message["content"], list) else []
        if other := {str(part.get("type")) for part in parts if isinstance(part, Mapping)} - {"text"}:
            raise ValueError(f"{origin}: message {index} ({role}) has parts of type {', '.join(sorted(other))}: prompts are text "
                             "alone; images are not supported in data and rollout")


def _nested(record: Mapping[str, Any], key: str) -> Any:
    """`record["a"]["b"]` for "a.b", or the column "a.b" itself; None where there is none."""
    if key in record:
        return record[key]
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value

