"""Which prompts come next: several weighted sources, shuffled anew in every epoch, resumable at any draw."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlrun.data.sample import Sample


class Draw(NamedTuple):
    """A drawn prompt. `number` counts all draws of the run: a prompt drawn twice makes two groups."""

    number: int
    epoch: int  # passes over this sample's source before this one
    sample: Sample


class Sampler:
    """Draws samples without end; the whole state is how many were drawn of each source.

    The next source is the one furthest below its share of the draws so far (ties: the earlier one). Within a source
    each sample comes once an epoch, in an order keyed by (seed, source, epoch)."""

    def __init__(self, sources: Sequence[Sequence[Sample]], weights: Sequence[float], seed: int = 0,
                 shuffle: bool = True) -> None:
        if not sources or not all(sources):
            raise ValueError("data.train needs at least one source, each with rows")
        assert len(sources) == len(weights)
        assert min(weights) > 0
        self.sources, self.seed, self.shuffle = sources, seed, shuffle
        self.shares = [weight / sum(weights) for weight in weights]
        self.drawn = [0] * len(sources)
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}

    @property
    def rows(self) -> int:
        return sum(map(len, self.sources))

    @property
    def draws_per_epoch(self) -> int:
        """Draws until every source, at its share, was gone through once; with one source its number of rows."""
        return max(int(np.ceil(round(len(s) / share, 6))) for s, share in zip(self.sources, self.shares))

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return sum(self.drawn) / self.draws_per_epoch

    def steps(self, epochs: int, prompts_per_step: int) -> int:
        """Whole steps in so many passes. Raises ValueError where the data are fewer than one step needs."""
        self._check(prompts_per_step)
        return epochs * self.draws_per_epoch // prompts_per_step

    def take(self, count: int) -> list[Draw]:
        """The next `count` samples. Raises ValueError where the data are fewer than that."""
        self._check(count)
        return [self._next() for _ in range(count)]

    def _check(self, count: int) -> None:
        if count > self.rows:
            raise ValueError(f"a step needs {count} prompts, but the training data have {self.rows} rows: "
                             "lower algorithm.prompts_per_step, or add data")

    def _next(self) -> Draw:
        number = sum(self.drawn)
        source = max(range(len(self.sources)), key=lambda i: (self.shares[i] * (number + 1) - self.drawn[i], -i))
        rows = self.sources[source]
        epoch, position = divmod(self.drawn[source], len(rows))
        self.drawn[source] += 1
        return Draw(number, epoch, rows[self._order(source, epoch)[position]])

    def _order(self, source: int, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.sources[source]))
        if self._orders.get(source, (-1, ()))[0] != epoch:
            generator = np.random.default_rng([self.seed, source, epoch])
            self._orders[source] = epoch, generator.permutation(len(self.sources[source])).tolist()
        return self._orders[source][1]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"drawn": list(self.drawn), "rows": [len(source) for source in self.sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was. Raises ValueError where the data changed since."""
        rows = [len(source) for source in self.sources]
        if state["rows"] != rows:
            raise ValueError(f"the training data changed: the checkpoint knows sources of {state['rows']} rows, "
                             f"now they have {rows}")
        self.drawn = list(state["drawn"])
