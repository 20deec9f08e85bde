"""A pool of processes for tests that need several ranks: started once, with a fresh process group for each call.

Fixtures `ranks1` and `ranks2` come with `from rlrun.testing.ranks import ranks1, ranks2` in a conftest.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

HANG_S = 240.0
"""A call that takes longer is hung: all stacks go to stderr, the processes are killed, TimeoutError is raised."""


class RankPool:
    """`world_size` processes, each one rank with gloo and one torch thread. Started by the first call."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = HANG_S) -> list[Any]:
        """fn(*args) on the first `ranks` processes (default: all), with torch.distributed initialised over just these.

        Functions, closures and classes of test modules travel by value. Returns what each rank returned. The first
        exception is raised again here, with its rank's traceback as a note; RuntimeError where a process died.
        """
        from ray import cloudpickle

        count = ranks or self.world_size
        self._start()
        for module in list(sys.modules.values()):
            folders = Path(getattr(module, "__file__", None) or "").parts[:-1]
            if "tests" in folders and "site-packages" not in folders:
                cloudpickle.register_pickle_by_value(module)
        payload = cloudpickle.dumps((fn, args))
        connections = [connection for _, connection in self._ranks[:count]]
        connections[0].send(("serve", count))
        port = connections[0].recv()
        for rank, connection in enumerate(connections):
            connection.send((rank, count, port, payload, timeout))
        results: dict[Connection, Any] = {}
        try:
            return self._results(connections, results, time.monotonic() + timeout)
        finally:
            if len(results) < count:
                self.close()  # some rank died or still waits for another: start anew

    def _start(self) -> None:
        if self._ranks:
            return
        context = multiprocessing.get_context("spawn")
        for _ in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _results(self, connections: list[Connection], results: dict[Connection, Any], deadline: float) -> list[Any]:
        from ray import cloudpickle

        failures: list[BaseException] = []
        while len(results) < len(connections):
            waiting = [c for c in connections if c not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                for process, _ in self._ranks:
                    os.kill(process.pid or 0, signal.SIGUSR1)
                time.sleep(0.5)
                raise TimeoutError("ranks hung; their stacks are on stderr")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections.index(connection)
                try:
                    ok, payload, trace = connection.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died") from None
                results[connection] = cloudpickle.loads(payload)
                if not ok:
                    results[connection].add_note(f"on rank {rank}:\n{trace}")
                    failures.append(results[connection])
                    deadline = min(deadline, time.monotonic() + 3.0)
        if failures:
            raise failures[0]
        return [results[connection] for connection in connections]

    def close(self) -> None:
        """Kill the processes; a later call starts new ones."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []


def share_gloo_thread() -> None:
    """Let all gloo groups of this process share one device. Each has a thread of its own otherwise, which wakes a hundred times a
    second as long as anything holds the group, as torch's caches do: after hundreds of tests that takes longer than they do."""
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    if isinstance(gloo, _SharedDevice):
        return
    device = gloo.create_default_device()

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        return gloo(store, rank, size, options)

    stand_in: Any = _SharedDevice("ProcessGroupGloo", (), {"make": staticmethod(make), "gloo": gloo})
    vars(distributed_c10d)["ProcessGroupGloo"] = stand_in


class _SharedDevice(type):
    """Stands for gloo's class: makes its objects, and knows them."""

    make: Callable[..., Any]
    gloo: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.gloo)


def _serve(connection: Connection) -> None:
    """A rank's loop: ends with its parent, also where that was killed."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    share_gloo_thread()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    for module in ("transformers", "rlrun.models.loading"):
        importlib.import_module(module)
    store: Any = None
    while True:
        message = connection.recv()
        if message[0] == "serve":
            store = TCPStore("127.0.0.1", 0, message[1], is_master=True, wait_for_workers=False)
            connection.send(store.port)
            continue
        rank, count, port, payload, timeout = message
        if rank > 0:
            store = TCPStore("127.0.0.1", port, count, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout))
        connection.send(_call(payload))
        dist.destroy_process_group()


def _call(payload: bytes) -> tuple[bool, bytes, str]:
    from ray import cloudpickle

    try:
        fn, args = cloudpickle.loads(payload)
        return True, cloudpickle.dumps(fn(*args)), ""
    except BaseException as error:  # noqa: BLE001 - raised again where the call came from
        trace = traceback.format_exc()
        try:
            return False, cloudpickle.dumps(error), trace
        except Exception:  # noqa: BLE001 - what cannot be pickled is shown as its traceback
            return False, cloudpickle.dumps(RuntimeError(repr(error))), trace


class _FirstRanks:
    """A view of a pool that uses only its first processes, so that a test session starts no more than it needs."""

    def __init__(self, pool: RankPool, ranks: int) -> None:
        self.pool = pool
        self.world_size = ranks

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = HANG_S) -> list[Any]:
        return self.pool.run(fn, *args, ranks=self.world_size, timeout=timeout)


@cache
def _shared() -> RankPool:
    return RankPool(2)


def ranks(count: int) -> RankPool | _FirstRanks:
    """One or two ranks; one pool for all test packages of a session."""
    return _shared() if count == 2 else _FirstRanks(_shared(), 1)


@pytest.fixture(scope="session")
def ranks2() -> RankPool | _FirstRanks:
    """Two ranks; one pool for all test packages of a session."""
    return ranks(2)


@pytest.fixture(scope="session")
def ranks1() -> RankPool | _FirstRanks:
    """One rank, in the first process of `ranks2`."""
    return ranks(1)
