"""Batch: what flows between rollout, workers and algorithms. Ragged, never padded.

S sequences lie end to end in one row of T tokens. Index t of every per-token column speaks of token ids[t]: its log-probability
given ids[<t], the value of the state before it. The first token of a sequence is never in `loss_mask`."""

from __future__ import annotations

import base64
import heapq
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Atom = Literal["sequence", "pair", "group"]
"""What splitting and balancing never cut: a sequence, or all sequences with one value in the column of that name."""


@dataclass
class Batch:
    """Sequences end to end. Columns are added with `batch.tokens[name] = ...`; every column keeps to the same order."""

    cu_seqlens: Tensor  # [S+1] int64: sequence s is cu_seqlens[s]:cu_seqlens[s+1] of every per-token column
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """Per-token columns [T]: ids, loss_mask (bool), log_probs, ref_log_probs, rollout_log_probs, values, token_rewards,
    advantages, returns."""
    sequences: dict[str, Any] = field(default_factory=dict)
    """Per-sequence columns [S], a Tensor or a list: uid, group, reward, correct, data_source, finish_reason,
    policy_version, prompt_length, and what plugins add."""
    ragged: dict[str, list[Any]] = field(default_factory=dict)  # one value of any shape for each sequence, such as pixel values

    def __post_init__(self) -> None:
        total, count = int(self.cu_seqlens[-1]), len(self)
        for name, column in self.tokens.items():
            if column.shape[0] != total:
                raise ValueError(f"per-token column {name!r} has {column.shape[0]} entries for {total} tokens")
        for name, values in [*self.sequences.items(), *self.ragged.items()]:
            if len(values) != count:
                raise ValueError(f"per-sequence column {name!r} has {len(values)} entries for {count} sequences")

    def __len__(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def position_ids(self) -> Tensor:
        """[T] position of each token in its own sequence."""
        return torch.arange(self.num_tokens, device=self.cu_seqlens.device) - self.cu_seqlens[:-1].repeat_interleave(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """[T] index of the sequence that each token belongs to."""
        return torch.arange(len(self), device=self.cu_seqlens.device).repeat_interleave(self.lengths)

    @staticmethod
    def from_sequences(tokens: Sequence[Mapping[str, Any]], sequences: Mapping[str, Any] | None = None) -> Batch:
        """From one mapping a sequence of per-token lists: `[{"ids": [...], "loss_mask": [...]}, ...]`, all of equal keys."""
        lengths = [len(row["ids"]) for row in tokens]
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64).tolist()], dtype=torch.int64)
        columns = {}
        for name in tokens[0] if tokens else ():
            values = chain.from_iterable(row[name] for row in tokens)
            columns[name] = torch.from_numpy(np.fromiter(values, _DTYPES.get(name, np.float32)))
        return Batch(cu_seqlens, columns, dict(sequences or {}))

    def select(self, rows: Sequence[int] | Tensor) -> Batch:
        """The sequences `rows`, in that order."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        order = rows.tolist()
        lengths = self.lengths[rows]
        cu_seqlens = torch.zeros(len(order) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=cu_seqlens[1:])
        starts = (self.cu_seqlens[:-1][rows] - cu_seqlens[:-1]).repeat_interleave(lengths)
        index = torch.arange(int(cu_seqlens[-1])) + starts
        return Batch(
            cu_seqlens,
            {name: column[index] for name, column in self.tokens.items()},
            {name: column[rows] if isinstance(column, Tensor) else [column[i] for i in order]
             for name, column in self.sequences.items()},
            {name: [column[i] for i in order] for name, column in self.ragged.items()},
        )

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Batches of equal columns, one behind the other."""
        first = batches[0]
        for batch in batches[1:]:
            theirs, ours = ([sorted(columns) for columns in (b.tokens, b.sequences, b.ragged)] for b in (batch, first))
            if theirs != ours:
                raise ValueError(f"batches differ in columns: {ours} against {theirs}")
        offsets = np.cumsum([0, *(b.num_tokens for b in batches)])
        cu_seqlens = torch.cat([b.cu_seqlens[(i > 0):] + int(offsets[i]) for i, b in enumerate(batches)])
        return Batch(
            cu_seqlens,
            {name: torch.cat([b.tokens[name] for b in batches]) for name in first.tokens},
            {name: _join([b.sequences[name] for b in batches]) for name in first.sequences},
            {name: [x for b in batches for x in b.ragged[name]] for name in first.ragged},
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with all tensors on `device`."""
        return Batch(
            to_device(self.cu_seqlens, device),
            {name: to_device(column, device) for name, column in self.tokens.items()},
            {n: to_device(c, device) if isinstance(c, Tensor) else c for n, c in self.sequences.items()},
            {n: [to_device(x, device) if isinstance(x, Tensor) else x for x in c] for n, c in self.ragged.items()},
        )

    def sums(self, column: Tensor) -> Tensor:
        """[S] sum over each sequence of a per-token column [T], where `loss_mask` is set; with gradient."""
        mask = self.tokens["loss_mask"]
        sums = torch.zeros(len(self), dtype=column.dtype, device=column.device)
        return sums.index_add(0, self.sequence_ids[mask], column[mask])

    def loss_lengths(self) -> Tensor:
        """[S] tokens of each sequence that are in `loss_mask`."""
        mask = self.tokens["loss_mask"]
        return torch.bincount(self.sequence_ids[mask], minlength=len(self))

    def denominators(self) -> dict[str, float]:
        """What each kind of loss term is divided by: loss tokens, and sequences and groups that have any.

        Groups are counted only where there is a column `group`."""
        lengths = self.loss_lengths()
        counts = {"tokens": float(lengths.sum()), "sequences": float((lengths > 0).sum()), "constant": 1.0}
        if "gap_mask" in self.tokens:
            counts["gap"] = float(self.tokens["gap_mask"].sum())
        if "group" in self.sequences:
            counts["groups"] = float(torch.as_tensor(self.sequences["group"])[lengths > 0].unique().numel())
        return counts

    def atoms(self, atom: Atom) -> list[list[int]]:
        """Rows that must stay together, in order of first appearance."""
        if atom == "sequence":
            return [[row] for row in range(len(self))]
        if atom not in self.sequences:
            raise ValueError(f"the loss keeps each {atom} whole, but the batch has no column {atom!r}")
        rows: dict[Any, list[int]] = {}
        for row, key in enumerate(torch.as_tensor(self.sequences[atom]).tolist()):
            rows.setdefault(key, []).append(row)
        return list(rows.values())


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`; on its way to a GPU, this process waits for nothing that the GPU has yet to do."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_text(value: Any) -> str:
    """Tensors in lists and dicts, bit for bit, for JSON; see `from_text`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def from_text(text: str) -> Any:
    """What `to_text` was given."""
    return torch.load(io.BytesIO(base64.b64decode(text)))


_DTYPES = {"ids": np.int64, "loss_mask": np.bool_, "gap_mask": np.bool_}


def _join(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Tensor):
        return torch.cat(list(columns))
    return [x for column in columns for x in column]


def mini_batches(batch: Batch, groups: int) -> Iterator[Batch]:
    """Batches of so many whole prompt groups, in the batch's order."""
    rows = batch.atoms("group")
    for start in range(0, len(rows), groups):
        yield batch.select([row for group in rows[start : start + groups] for row in group])


def balance(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Cut items into `parts` of nearly equal weight (largest first, to the lightest part). Some may stay empty.

    Deterministic: ties go to the earlier item and part. Items of a part are in rising order."""
    heap = [(0, 0, part) for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        weight, count, part = heapq.heappop(heap)
        chosen[part].append(item)
        heapq.heappush(heap, (weight + weights[item], count + 1, part))
    return [sorted(items) for items in chosen]


def shard(batch: Batch, parts: int, atom: Atom = "sequence") -> list[list[int]]:
    """Rows of each of `parts` shards, balanced by tokens; atoms stay whole. Every row is in exactly one shard."""
    atoms = batch.atoms(atom)
    lengths = batch.lengths.tolist()
    weights = [sum(lengths[row] for row in rows) for rows in atoms]
    return [sorted(row for a in items for row in atoms[a]) for items in balance(weights, parts)]


def micro_batches(batch: Batch, max_tokens: int, atom: Atom = "sequence", at_least: int = 1) -> list[list[int]]:
    """Rows of each micro-batch: as few as fit `max_tokens`, but `at_least` so many, balanced; atoms stay whole.

    Some are empty where there are fewer atoms than `at_least`. Raises ValueError for an atom longer than the limit."""
    atoms = batch.atoms(atom)
    lengths = batch.lengths.tolist()
    weights = [sum(lengths[row] for row in rows) for rows in atoms]
    if weights and max(weights) > max_tokens:
        raise ValueError(f"one {atom} has {max(weights)} tokens, more than the {max_tokens} of one micro-batch: raise "
                         "actor.tokens_per_micro_batch, or lower data.max_prompt_tokens or rollout.max_new_tokens")
    count = max(at_least, -(-sum(weights) // max_tokens))
    while True:
        parts = balance(weights, count)
        if all(sum(weights[a] for a in items) <= max_tokens for items in parts):
            return [sorted(row for a in items for row in atoms[a]) for items in parts]
        count += 1


def inverse(rows: Iterable[Sequence[int]]) -> list[int]:
    """For row lists that together hold each row once: where each row went, so that `parts.select(inverse(rows))` undoes."""
    order = [row for part in rows for row in part]
    positions = [0] * len(order)
    for position, row in enumerate(order):
        positions[row] = position
    return positions
