"""What backends need to train: micro-batches that ranks agree on, loss terms added up over them, steps that are not taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlrun.batch import micro_batches
from rlrun.metrics import Value

if TYPE_CHECKING:
    from rlrun.batch import Atom, Batch
    from rlrun.workers.protocol import Kind, Term


class Terms:
    """Sums of the loss terms of one update, over this rank's micro-batches."""

    def __init__(self, denominators: Mapping[str, float]) -> None:
        self.denominators = denominators
        self.sums: dict[tuple[str, Kind], Tensor] = {}

    def loss(self, outputs: Mapping[str, Tensor], terms: Mapping[str, Term], factor: float = 1.0) -> Tensor:
        """A micro-batch's part of the global loss, times `factor`. Its terms are added to the sums."""
        # Zero, with a gradient of exact zeros: every rank runs the same backward, whatever its loss depends on.
        total = torch.stack([column[:0].sum() for column in outputs.values()]).sum()
        for name, term in terms.items():
            value, key = term.sum.detach().double(), (name, term.kind)
            if term.kind == "max":
                self.sums[key] = torch.maximum(self.sums.get(key, value), value)
                continue
            self.sums[key] = self.sums.get(key, 0.0) + value
            if term.coef != 0.0:
                total = total + term.sum * (term.coef * factor / (self.denominators[term.kind] or 1.0))
        return total

    def numbers(self) -> dict[tuple[str, Kind], float]:
        """The sums; waits for the device, once."""
        return dict(zip(self.sums, torch.stack([*self.sums.values()]).tolist() if self.sums else []))

    def values(self, shards: Sequence[Mapping[tuple[str, Kind], float]]) -> dict[str, Value]:
        """Terms over the `numbers` of all data-parallel shards, an equal part of each for every shard, so that shards add up
        to the whole."""
        values = {}
        for name, kind in dict.fromkeys(key for shard in shards for key in shard):
            numbers = [shard[name, kind] for shard in shards if (name, kind) in shard]
            values[name] = (Value(max(numbers)) if kind == "max" else
                            Value(math.fsum(numbers) / len(shards), self.denominators[kind] / len(shards)))
        return values


def agreed_micro_batches(batch: Batch, max_tokens: int, atom: Atom, device: torch.device, multiple: int = 1) -> list[list[int]]:
    """Rows of each micro-batch, sorted by length (see `Packed.runs`); as many on every rank, some empty. Collective.

    Raises ValueError where a sequence's first token is in the loss."""
    starts = batch.cu_seqlens[:-1][batch.lengths > 0]
    if batch.num_tokens and bool(batch.tokens["loss_mask"][starts].any()):
        raise ValueError("loss_mask is set on the first token of a sequence, which nothing predicts")
    lengths = batch.lengths.tolist()
    parts = micro_batches(batch, max_tokens, atom)
    count = torch.tensor(len(parts), device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    parts += [[]] * (int(count) + -int(count) % multiple - len(parts))
    return [sorted(rows, key=lengths.__getitem__) for rows in parts]


def guarded_step(optimizer: Any, step: Callable[[], object], grads: Callable[[], list[Tensor]], square: float, lr: float,
                 clip_grad: float) -> dict[str, Value]:
    """An optimizer's `step` at rate `lr`, by a full gradient of norm sqrt(`square`) that is clipped to `clip_grad` (0: not) by
    scaling this rank's `grads`; none where the norm is not finite, which is the same on every rank."""
    norm = math.sqrt(square) if math.isfinite(square) else math.inf
    skipped = math.isinf(norm)
    if not skipped:
        if 0 < clip_grad < norm:
            torch._foreach_mul_(grads(), clip_grad / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        step()
    return {"grad_norm": Value(norm), "lr": Value(lr), "skipped": Value(float(skipped))}
