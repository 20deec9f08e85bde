"""Scoring in processes of their own, with a time limit for each sample: a reward that hangs or crashes ends alone."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.context
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any, NamedTuple

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from rlrun.rewards import scoring
from rlrun.rewards.protocol import RewardItem, Score

if TYPE_CHECKING:
    from rlrun.config.schema import RewardConfig, RewardPart

log = logging.getLogger(__name__)

_START_LIMIT_S = 300.0
_TASK_S = 0.01
_LARGEST_TASK = 32
MODEL = "model"  # the kind of reward that the ranks work out, not a process (`rlrun.rewards.model`), and its part in metrics
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError)
Scored = list[tuple[Score, str]]


@dataclass
class _Task:
    """Some samples on their way through one process."""

    items: list[RewardItem]
    future: Future[Any]
    tries: int = 1
    scores: Scored | None = None


class Ticket(NamedTuple):
    """One sample that `submit` took in."""

    task: _Task
    place: int


class RewardPool:
    """Scores samples as `config` says, in `config.processes` processes that are killed and replaced when time is up.

    `parts` are rewards (see `part_specs`), or one environment, whose samples are `Turn`s and whose scores `Answer`s.
    `plugin_files` are (module name, file) pairs to import first. Raises ValueError where a part cannot be made."""

    def __init__(self, config: RewardConfig, parts: Sequence[scoring.PartSpec],
                 plugin_files: Sequence[tuple[str, str]] = ()) -> None:
        self.config = config
        self.parts = list(parts)
        self.plugin_files = [(name, os.path.abspath(path)) for name, path in plugin_files]
        self.errors = OnError(config.on_error)
        self._seconds = _TASK_S
        # Linux ties a child's life to the thread that started it, so the first ones need a thread that stays
        self._starter = ThreadPoolExecutor(1)
        self._start()

    def submit(self, items: Sequence[RewardItem]) -> list[Ticket]:
        """Begin to score. Fast rewards get several samples at once, slow ones one."""
        size = max(1, min(_LARGEST_TASK, int(_TASK_S / self._seconds), -(-len(items) // self.config.processes)))
        tickets = []
        for start in range(0, len(items), size):
            chunk = list(items[start : start + size])
            task = _Task(chunk, self._schedule(chunk))
            tickets += [Ticket(task, place) for place in range(len(chunk))]
        return tickets

    def collect(self, tickets: Sequence[Ticket]) -> list[Score]:
        """Wait for the scores, in the order of the tickets. Raises RuntimeError for an error if on_error is raise."""
        return [self.errors.settle(*self._scored(t.task)[t.place], t.task.items[t.place]) for t in tickets]

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return self.collect(self.submit(items))

    def close(self) -> None:
        """End the processes, and whatever they started."""
        self._stop()
        self._starter.shutdown()

    def _start(self) -> None:
        """Make a pool whose processes hold every part: tried with no samples, outside any sample's time limit."""
        arguments = (os.getpid(), self.plugin_files, self.parts)
        self._pool = ProcessPool(self.config.processes, initializer=scoring.start, initargs=arguments, context=_SpawnContext())
        scheduled = self._starter.submit(self._pool.schedule, scoring.score, args=([],))
        try:
            scheduled.result().result(timeout=_START_LIMIT_S)
        except (scoring.RewardUnusableError, BrokenProcessPool, TimeoutError) as error:
            self.close()
            if isinstance(error, scoring.RewardUnusableError):
                raise ValueError(str(error)) from None
            what = "hung" if isinstance(error, TimeoutError) else "died"
            names = ", ".join(part.name for part in self.parts)
            raise ValueError(f"the scoring process {what} while it made the reward {names}") from error

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _schedule(self, items: list[RewardItem]) -> Future[Any]:
        try:
            return self._pool.schedule(scoring.score, args=(items,), timeout=self.config.timeout_s)
        except RuntimeError:  # the processes died while idle
            self._stop()
            self._start()
            return self._schedule(items)

    def _scored(self, task: _Task) -> Scored:
        """A task's scores. One that timed out or crashed is done again sample by sample, to find the culprit."""
        if task.scores is None:
            try:
                task.scores, seconds = task.future.result()
                self._seconds = max(0.9 * self._seconds + 0.1 * seconds / len(task.items), 1e-6)
            except scoring.RewardUnusableError as error:
                raise ValueError(str(error)) from None
            except (BrokenProcessPool, CancelledError, TimeoutError, ProcessExpired, *_UNPICKLABLE) as error:
                if isinstance(error, ProcessExpired):
                    _kill_group(error.pid)
                # a process that dies before it is known to have begun breaks the pool: another try shows whose fault
                again = isinstance(error, BrokenProcessPool | CancelledError) and task.tries < 3
                if len(task.items) > 1 or again:
                    task.scores = self._one_by_one(task)
                else:
                    task.scores = [(Score(0.0, 0.0, error=self._describe(error)), "")]
        return task.scores

    def _one_by_one(self, task: _Task) -> Scored:
        singles = [_Task([item], self._schedule([item]), task.tries + 1) for item in task.items]
        return [self._scored(single)[0] for single in singles]

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"time-out: no score within {self.config.timeout_s:g} s"
        if isinstance(error, ProcessExpired):
            return f"crash: the scoring process died (exit code {error.exitcode})"
        if isinstance(error, BrokenProcessPool):
            return "crash: the scoring process died at once, three times"
        return " ".join(f"{type(error).__name__}: {error}".split())


@dataclass
class OnError:
    """`reward.on_error`: reward 0, no reward, or the run's end. Errors are named in the log once a kind, and counted."""

    how: str
    counts: Counter[str] = field(default_factory=Counter)  # samples by kind of error, since the start

    def settle(self, score: Score, trace: str, item: RewardItem) -> Score:
        """The score that counts. `trace` is the error's traceback, "" where there is none."""
        if score.error is None:
            return score
        kind = score.error.split(": ")[0] if trace == "" else ": ".join(score.error.split(": ")[:2])
        self.counts[kind] += 1
        what = f"reward of a {item.data_source} sample: {score.error}; the completion begins {item.completion[:80]!r}"
        if self.how == "raise":
            raise RuntimeError(f"{what} (reward.on_error is raise)\n{trace}")
        if self.counts[kind] == 1:
            log.warning("%s. Such samples %s (reward.on_error). Further ones are counted, not named.\n%s", what,
                        "get reward 0" if self.how == "zero" else "are dropped", trace)
        return score if self.how == "zero" else replace(score, reward=None)


def part_specs(config: RewardConfig, resolve: Mapping[str, str]) -> list[scoring.PartSpec]:
    """The parts of the weighted sum that processes work out (all but a reward model). A second part of a kind is named
    kind_2. `resolve` maps kinds to "package.module:Class"."""
    specs: list[scoring.PartSpec] = []
    for part in reward_parts(config):
        if part.kind == MODEL:
            continue
        same = sum(spec.path == resolve[part.kind] for spec in specs)
        name = part.kind if not same else f"{part.kind}_{same + 1}"
        specs.append(scoring.PartSpec(name, resolve[part.kind], part.weight, dict(part.kwargs)))
    return specs


def reward_parts(config: RewardConfig) -> list[RewardPart]:
    """All parts, also where there is one given by kind. Raises ValueError for two reward models."""
    from rlrun.config.schema import RewardPart  # not above: scoring processes import this module

    parts = config.parts if config.kind is None else [RewardPart(kind=config.kind, kwargs=config.kwargs)]
    if sum(part.kind == MODEL for part in parts) > 1:
        raise ValueError(f"reward.parts has two of kind {MODEL}; the ranks hold one reward model")
    return parts


def _kill_group(pid: int | None) -> None:
    """Kill the process group that a scoring process led: itself and what it started."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


_launching = threading.Lock()
_preparation_data = spawn.get_preparation_data


def _without_main(name: str) -> dict[str, Any]:
    data = _preparation_data(name)
    if name == WORKERS_NAME:
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


class _SpawnProcess(multiprocessing.context.SpawnProcess):
    """Does not run the parent's main script again: it may train, or lack a __main__ guard."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _launching:
            spawn.get_preparation_data = _without_main
            try:
                return multiprocessing.context.SpawnProcess._Popen(process_obj)
            finally:
                spawn.get_preparation_data = _preparation_data

    def terminate(self) -> None:
        """Kill at once, with everything that the process started."""
        _kill_group(self.pid)
        super().kill()


class _SpawnContext(multiprocessing.context.SpawnContext):
    Process = _SpawnProcess
