"""Ranks as Ray actors: placed so that all fit or none starts, watched, and ended with the run."""

import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlrun.config.schema import Config
from rlrun.errors import RankError, ResourceError
from rlrun.plugins import Plugins
from rlrun.workers import rank as rank_module

log = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 40.0
SECOND_FAILURE_WAIT_S = 3.0
STACKS_WAIT_S = 10.0
START_LIMIT_S = 300.0
LONGEST_BASE = 26  # Ray's sockets lie up to 80 characters deeper, and their paths may have 107

REAPER = r"""
read -r _; killed=$?
for p in /proc/[0-9]*; do
    grep -qs ^ray:: $p/cmdline && ls -l $p/fd 2>/dev/null | grep -qF "$0/" && kill -9 ${p#/proc/}
done
[ $killed = 0 ] || sleep 1
rm -rf "$0"
"""
"""Removes a cluster's folder, at the run's end or where the driver is killed. Most of Ray's processes die then, but its agents
may try to report that for a minute; they are known by the log files that they hold open there."""


class RayRank(rank_module.Rank):
    """A rank as an actor; `stacks` answers from a thread of its own while another call hangs."""

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stacks(self) -> str:
        return rank_module.stacks()


class Cluster:
    """A Ray cluster of this run alone, or a running one that it joins (resources.ray_address)."""

    def __init__(self, address: str | None) -> None:
        self.folder: str | None = None
        options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING, "namespace": "rlrun"}
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it tells of its default at each start
        on_terminate = signal.getsignal(signal.SIGTERM)
        # What starts with SIGTERM blocked outlives one to the whole process group, as timeout and schedulers send it: the
        # driver saves, then ends Ray. Here, one that comes meanwhile waits for the driver's own handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            if address is None:
                base = tempfile.gettempdir()
                self.folder = tempfile.mkdtemp(prefix="rlrun-", dir=base if len(base) <= LONGEST_BASE else "/tmp")
                self.reaper = subprocess.Popen(["sh", "-c", REAPER, self.folder], stdin=subprocess.PIPE, start_new_session=True)
                os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
                os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves ranks beside any other work on the machine
                self._start({**options, "address": "local", "include_dashboard": False, "_temp_dir": self.folder,
                             "object_store_memory": _object_store_bytes()})
            else:
                ray.init(**options, address=address)
        except BaseException:
            self.close()
            raise
        finally:
            signal.signal(signal.SIGTERM, on_terminate)  # Ray's would end the driver at once
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _start(self, options: dict[str, Any], attempts: int = 4) -> None:
        """Start the cluster's processes, again where another cluster took one of its ports first."""
        for attempt in range(attempts):
            try:
                ray.init(**options)
            except (RuntimeError, ConnectionError, OSError, TimeoutError) as error:
                ray.shutdown()
                if attempt == attempts - 1:
                    raise ResourceError(f"Ray did not start in {attempts} attempts: {error}") from error
                log.warning("Ray did not start (%s); trying again", error)
                time.sleep(1.0 + attempt)
            else:
                return

    def close(self) -> None:
        ray.shutdown()
        if self.folder:
            self.reaper.communicate(b"the end\n")
            self.folder = None


def _object_store_bytes() -> int:
    """Room for the batches in flight: a tenth of the memory, at most 2 GB, and no more than half of shared memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else memory
    return max(80_000_000, min(2_000_000_000, memory // 10, shared // 2))


class RayRanks:
    """The training ranks as Ray actors in one placement group."""

    def __init__(self, config: Config, plugins: Plugins) -> None:
        """Start or join Ray, place all ranks, connect them. Raises ResourceError where they do not fit."""
        self.config = config
        self.count = config.resources.train_ranks + config.resources.rollout_ranks
        self.actors: list[Any] = []
        self.group: Any = None
        self._asking = threading.Lock()
        """Two threads may ask: all ranks must be asked in the same order, since their work is collective."""
        if config.resources.ray_address is None:  # known without starting Ray
            self._demand({"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()})
        self.cluster = Cluster(config.resources.ray_address)
        try:
            there = ray.cluster_resources()
            device, need = self._demand(there)
            self._place(need, there)
            self._spawn(device, need, plugins)
        except BaseException:
            self.close()
            raise

    def _demand(self, there: Mapping[str, float]) -> tuple[str, dict[str, float]]:
        """The ranks' device, and what one rank needs. Raises ResourceError where not all of them fit in what is there."""
        resources = self.config.resources
        device = ("cuda" if there.get("GPU", 0) else "cpu") if resources.device == "auto" else resources.device
        need = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": float(resources.threads_per_rank)}
        for kind, each in need.items():
            if each * self.count > there.get(kind, 0):
                raise ResourceError(
                    f"resources.train_ranks (and rollout_ranks): {self.count} ranks on {device} need {each * self.count:g} "
                    f"{kind}, there are {there.get(kind, 0):g}", "lower resources.train_ranks or resources.threads_per_rank, or "
                    "join a larger cluster: resources.ray_address")
        return device, need

    def _place(self, need: dict[str, float], there: Mapping[str, float]) -> None:
        self.group = placement_group([need] * self.count, strategy="PACK")
        if not self.group.wait(PLACEMENT_TIMEOUT_S):
            free = {k: v for k, v in ray.available_resources().items() if k in need}
            raise ResourceError(f"no room for {self.count} ranks of {need} within {PLACEMENT_TIMEOUT_S:g} s: free are {free} of "
                                f"{ {k: there.get(k, 0) for k in need} }; another job holds the rest")

    def _spawn(self, device: str, need: dict[str, float], plugins: Plugins) -> None:
        env = {"OMP_NUM_THREADS": str(self.config.resources.threads_per_rank), "TOKENIZERS_PARALLELISM": "false"}
        actor = ray.remote(concurrency_groups={"control": 1})(RayRank)
        for rank in range(self.count):
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
            placed = actor.options(num_cpus=need["CPU"], num_gpus=need.get("GPU", 0), max_restarts=0,
                                   runtime_env={"env_vars": env}, scheduling_strategy=place)
            self.actors.append(placed.remote(rank, self.count, device, self.config, plugins))
        [(_, address)] = self.run("open_store", [()])
        list(self.run("connect", [address] * self.count))

    def run(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        chosen = self.actors[first : first + len(arguments)]
        with self._asking:
            refs = [getattr(a, method).remote(*args) for a, args in zip(chosen, arguments, strict=True)]
        yield from self._as_completed(method, refs, first)

    def _as_completed(self, method: str, refs: Sequence[Any], first: int) -> Iterator[tuple[int, Any]]:
        rank_of = {ref: rank for rank, ref in enumerate(refs, first)}
        pending = list(refs)
        limit = self.config.trainer.phase_timeout_s
        deadline = time.monotonic() + (max(limit, START_LIMIT_S) if method in ("open_store", "connect") else limit)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise self._hung(method, [rank_of[ref] for ref in pending])
            for ref in done:
                try:
                    result = ray.get(ref)
                except (RayTaskError, RayActorError) as error:
                    raise self._failed(method, rank_of, {rank_of[ref]: error}, pending) from None
                yield rank_of[ref], result

    def _failed(self, method: str, rank_of: dict[Any, int], errors: dict[int, Exception], pending: list[Any]) -> RankError:
        """The error to report. A rank that dies makes its peers' collectives fail too, perhaps sooner: look for the cause."""
        done, stuck = ray.wait(pending, num_returns=len(pending), timeout=SECOND_FAILURE_WAIT_S) if pending else ([], [])
        for ref in done:
            try:
                ray.get(ref)
            except (RayTaskError, RayActorError) as error:
                errors[rank_of[ref]] = error
        rank = min(errors, key=lambda r: not isinstance(errors[r], RayActorError))
        first = errors[rank]
        if isinstance(first, RayTaskError):
            # where another rank still waits for this one, nobody can go on
            cause = first.cause if isinstance(first.cause, Exception) and not stuck else None
            uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", str(first))
            return RankError(f"rank {rank} failed in {method}:\n{uncoloured}", cause=cause)
        return RankError(f"rank {rank} died in {method}: its process ended.\n{first}\nWhere the machine ran out of memory, "
                         "lower tokens_per_micro_batch or rollout.engine_args.max_num_seqs.")

    def _hung(self, method: str, ranks: Sequence[int]) -> RankError:
        dumps = []
        for rank, actor in enumerate(self.actors):
            try:
                dumps.append(f"--- rank {rank}\n{ray.get(actor.stacks.remote(), timeout=STACKS_WAIT_S)}")
            except (ray.exceptions.GetTimeoutError, RayActorError, RayTaskError) as error:
                dumps.append(f"--- rank {rank}: no stacks ({type(error).__name__}: {error})")
        return RankError(f"{method} took longer than trainer.phase_timeout_s = {self.config.trainer.phase_timeout_s:g} s; "
                         f"waiting for ranks {list(ranks)}. Stacks:\n" + "\n".join(dumps))

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors = []
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None
        self.cluster.close()
