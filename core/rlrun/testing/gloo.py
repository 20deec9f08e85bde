"""A WorkerGroup on the ranks of a RankPool: the whole of sharding, balancing and merging, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlrun.config.schema import Config
from rlrun.plugins import Plugins
from rlrun.testing.ranks import HANG_S, RankPool, _FirstRanks
from rlrun.workers.group import WorkerGroup
from rlrun.workers.rank import Rank


class ProbedRank(Rank):
    """A rank that also shows what its workers hold."""

    def weights(self, role: str) -> dict[str, Tensor]:
        """A role's full weights."""
        return {name: tensor.clone() for name, tensor in self.workers[role].weights()}


class GlooRanks:
    """`rlrun.workers.group.Ranks` over the process group at hand: its first rank is the driver too, the others `serve`."""

    def __init__(self, config: Config, plugins: Plugins) -> None:
        self.count = dist.get_world_size()
        self.rank = ProbedRank(dist.get_rank(), self.count, "cpu", config, plugins)

    def run(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        answers: list[Any] = [None] * self.count
        dist.gather_object(self._call([(method, a) for a in arguments]), answers)
        yield from enumerate(answers)

    def serve(self) -> None:
        """Answer the first rank's calls until it closes."""
        while (answer := self._call(None)) is not dist:
            dist.gather_object(answer)

    def close(self) -> None:
        self._call([None] * self.count)

    def _call(self, calls: list[Any] | None) -> Any:
        """Take this rank's part of a call, and do it. `dist` itself says that there are no more."""
        from ray import cloudpickle

        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [cloudpickle.dumps(call) for call in calls] if calls else None)
        call = cloudpickle.loads(mine[0])
        return dist if call is None else getattr(self.rank, call[0])(*call[1])


def drive(
    pool: RankPool | _FirstRanks, config: Config, script: Callable[..., Any], *args: Any, timeout: float = HANG_S
) -> Any:
    """What `script(worker_group, plugins, config, *args)` returns, run beside the pool's first rank."""
    config.resources.train_ranks = pool.world_size
    return pool.run(_drive, config, script, args, timeout=timeout)[0]


def _drive(config: Config, script: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    plugins = Plugins.load(config.plugins)
    ranks = GlooRanks(config, plugins)
    if dist.get_rank() > 0:
        return ranks.serve()
    result = script(WorkerGroup(ranks, plugins.layout(config)), plugins, config, *args)
    ranks.close()
    return result
