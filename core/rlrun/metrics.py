"""Metrics under the names that users know. They travel as (sum, count) or maxima and become numbers once, on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Value(NamedTuple):
    """A metric on its way: a sum with what it is divided by, or (count None) a maximum."""

    total: float
    count: float | None = None

    @property
    def result(self) -> float:
        return self.total if self.count is None else self.total / self.count


def merge(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Metrics of several ranks or updates as one: sums and counts add, maxima compete."""
    merged: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            old = merged.get(name)
            if old is None:
                merged[name] = value
            elif (old.count is None) != (value.count is None):
                raise ValueError(f"metric {name!r} is a mean in one place and a maximum in another")
            elif old.count is None or value.count is None:
                merged[name] = Value(max(old.total, value.total))
            else:
                merged[name] = Value(old.total + value.total, old.count + value.count)
    return merged
