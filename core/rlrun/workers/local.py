"""The one rank of `launcher: local`, in the driver's own process: the same code without Ray, for debugging."""

import faulthandler
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rlrun.workers.rank import Rank


class LocalRanks:
    """Calls the rank directly. A phase that outlasts its limit prints all stacks and ends the process."""

    count = 1

    def __init__(self, rank: Rank, phase_timeout_s: float) -> None:
        self.rank = rank
        self.phase_timeout_s = phase_timeout_s
        rank.connect(*rank.open_store())

    def run(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        faulthandler.dump_traceback_later(self.phase_timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            result = getattr(self.rank, method)(*arguments[0])
        finally:
            faulthandler.cancel_dump_traceback_later()
        yield 0, result

    def close(self) -> None:
        self.rank.close()
