"""The driver's view of all ranks: whole batches in, whole batches out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlrun.batch import Atom, Batch, inverse, shard
from rlrun.metrics import Value, merge
from rlrun.rollout.protocol import Completion, Request, SamplingParams
from rlrun.workers.protocol import Layout, Loss, RoleRequest


class Ranks(Protocol):
    """Ranks that can be asked: those of Ray (`ray_ranks.py`), or the one in the driver's process (`local.py`)."""

    count: int

    def run(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        """Call a method of `Rank` on ranks from `first` on, each with its own arguments: (rank, result) as they finish.

        Raises RankError with the failing rank's traceback, or when the phase takes longer than trainer.phase_timeout_s."""

    def close(self) -> None:
        """End all ranks. May be called at any time, also twice."""


class WorkerGroup:
    """Roles spread over ranks. Splits batches over data-parallel shards and puts results together in the batch's order.

    Ranks beyond those of `layout` only generate; without any, the ranks that train hold the engines too (colocated)."""

    def __init__(self, ranks: Ranks, layout: Layout, ranks_per_engine: int = 1) -> None:
        self.ranks = ranks
        self.layout = layout
        self.colocated = ranks.count == layout.ranks
        self.engines = range(0 if self.colocated else layout.ranks, ranks.count, ranks_per_engine)  # first rank of each engine
        self.roles: dict[str, RoleRequest] = {}
        self.awake = False
        self.version = -1

    def call(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank that trains; results by rank."""
        results = dict(self.ranks.run(method, [args] * self.layout.ranks))
        return [results[rank] for rank in range(self.layout.ranks)]

    def start_engines(self) -> None:
        """Start all engines, asleep."""
        self._on_engines("start_engine")

    def _on_engines(self, method: str) -> None:
        first = self.engines.start
        list(self.ranks.run(method, [()] * (self.ranks.count - first), first))

    def build(self, role: str, request: RoleRequest, total_updates: int, want: frozenset[str]) -> None:
        """Make a role's model, in the place of one of that name."""
        self.call("build", role, request, self.layout, total_updates, want)
        self.roles[role] = request

    def keep(self, roles: Iterable[str]) -> None:
        """Drop all roles but these."""
        for role in set(self.roles) - set(roles):
            self.call("drop", role)
            del self.roles[role]

    def sync(self, version: int) -> None:
        """Wake the engines and give them the actor's weights, unless they have this version and are awake."""
        if not self.awake or self.version != version:
            self.version = -1
            list(self.ranks.run("sync_weights", [(version,)] * self.ranks.count))
            self.awake, self.version = True, version

    def sleep(self) -> None:
        """Take the device's memory back from engines that share it; the next `sync` wakes them."""
        if self.awake and self.colocated:
            self._on_engines("sleep_engine")
            self.awake = False

    def forward(self, role: str, batch: Batch, want: AbstractSet[str], temperature: float,
                atom: Atom = "sequence") -> dict[str, Tensor]:
        """Per-token columns [T] of a role's model, in the batch's order; log-probabilities at `temperature`."""
        rows = shard(batch, self.layout.dp, atom)
        shards = self._shards(batch, rows)
        results = dict(self.ranks.run("forward", [(role, part, want, temperature) for part in shards]))
        return self._columns(results, shards, rows)

    def update(
        self, role: str, batch: Batch, loss: Loss, denominators: Mapping[str, float], temperature: float,
        atom: Atom = "sequence", keep: dict[str, Tensor] | None = None,
    ) -> dict[str, Value]:
        """One optimizer step of a role on a mini-batch. Returns the loss's terms over all ranks, grad_norm, lr and skipped.

        What is not finite, which all ranks say alike, counts as one `nonfinite/NAME`. `keep` is filled with the columns [T] that
        the update's own forward computed, of the model before the step."""
        rows = shard(batch, self.layout.dp, atom)
        shards, keeps = self._shards(batch, rows), keep is not None
        results = dict(self.ranks.run("update", [(role, part, loss, denominators, temperature, atom, keeps) for part in shards]))
        if keep is not None:
            keep.update(self._columns({rank: kept for rank, (_, kept) in results.items()}, shards, rows))
        merged = merge(results[rank][0] for rank in self.layout.result_ranks)
        return {k: Value(1.0, None, "sum") if k.startswith("nonfinite/") else v for k, v in merged.items()}

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[list[Completion]]:
        """Completions of all requests, engine by engine as they finish. Requests are dealt out in turn."""
        first, size = self.engines.start, self.engines.step
        dealt = [(list(requests[(rank - first) // size :: len(self.engines)]), params) for rank in range(first, self.ranks.count)]
        for rank, completions in self.ranks.run("generate", dealt, first):
            if rank in self.engines:
                yield completions

    def save(self, role: str, directory: Path, contents: Sequence[str], background: bool = False) -> None:
        """Save a role; in the background, it is written by the time that `finish_saving` returns."""
        self.call("save", role, str(directory), list(contents), background)

    def saved(self) -> bool:
        """Whether all that is saved in the background is written, or failed."""
        return all(self.call("saved"))

    def finish_saving(self) -> None:
        """Wait for what is saved in the background. Raises what went wrong there."""
        self.call("finish_saving")

    def load(self, role: str, directory: Path, contents: Sequence[str]) -> None:
        self.call("load", role, str(directory), list(contents))

    @contextmanager
    def traced(self, step: int, wanted: bool) -> Iterator[None]:
        """Where `wanted`, ranks that train trace what they do meanwhile, as the backend's `profile` says."""
        if wanted:
            self.call("begin_trace", step)
        yield
        if wanted:
            self.call("finish_trace")

    def memory(self) -> dict[str, Value]:
        return merge(dict(self.ranks.run("memory", [()] * self.ranks.count)).values())

    def close(self) -> None:
        self.ranks.close()

    def _columns(self, results: Mapping[int, dict[str, Tensor]], shards: Sequence[Batch],
                 rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Columns of all shards, each from the rank whose answer counts, in the whole batch's order."""
        parts = [Batch(shards[rank].cu_seqlens, results[rank]) for rank in self.layout.result_ranks if len(shards[rank])]
        return Batch.concat(parts).select(inverse(r for r in rows if r)).tokens

    def _shards(self, batch: Batch, rows: Sequence[Sequence[int]]) -> list[Batch]:
        """Each rank's batch. Only tensors travel: what ranks compute with."""
        slim = Batch(batch.cu_seqlens, batch.tokens, {n: c for n, c in batch.sequences.items() if isinstance(c, Tensor)},
                     batch.ragged)
        parts = [slim.select(r) for r in rows]
        return [parts[self.layout.dp_index[rank]] for rank in range(self.layout.ranks)]
