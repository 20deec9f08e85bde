"""One device's process: its part of every role, and the engine. The same code under Ray and in the driver's process."""

import logging
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from transformers.utils.logging import disable_progress_bar

from rlrun.batch import Atom, Batch
from rlrun.config.schema import Config
from rlrun.memory import empty_cache
from rlrun.metrics import Value
from rlrun.plugins import Plugins
from rlrun.rollout.protocol import Completion, Request, Rollout, SamplingParams
from rlrun.workers.channel import WeightChannel
from rlrun.workers.profile import begin_trace
from rlrun.workers.protocol import Layout, Loss, RoleRequest, RoleSpec, Worker

log = logging.getLogger(__name__)


class Rank:
    """Holds the workers of one rank by role, and runs what the driver asks for, in lockstep with the other ranks."""

    def __init__(self, rank: int, ranks: int, device: str, config: Config, plugins: Plugins) -> None:
        """`plugins` loads the driver's list in this process, and refuses to go on where a name or version differs."""
        logging.basicConfig(format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
        logging.getLogger("rlrun").setLevel(logging.INFO)
        disable_progress_bar()
        # What of the reports on loading matters is an error already; the rest is the head that a critic does not take.
        for module in ("modeling_utils", "distributed.tensor_parallel"):
            logging.getLogger(f"transformers.{module}").setLevel(logging.ERROR)
        self.rank = rank
        self.ranks = ranks
        self.plugins = plugins
        self.config = config
        self.workers: dict[str, Worker] = {}
        self.engine: Rollout | None = None
        self.active: str | None = None  # the role whose state was last brought to the device
        self.writer = ThreadPoolExecutor(1)
        self.writes: list[Future[None]] = []
        self.channel: WeightChannel | None = None
        self.device = torch.device("cuda:0" if device == "cuda" else device)  # a rank sees its own GPU alone
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(self.config.resources.threads_per_rank)

    def open_store(self) -> tuple[str, int]:
        """First rank: open the rendezvous on a port that the system picks, so that no two runs can race for one."""
        host = socket.gethostbyname(socket.gethostname()) if self.ranks > 1 else "127.0.0.1"
        self.store = TCPStore(host, 0, self.ranks, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def connect(self, host: str, port: int) -> None:
        """Join the process group of all ranks that train, or of all that only generate, and the channel between the two."""
        if self.rank > 0:
            self.store = TCPStore(host, port, self.ranks, is_master=False)
        trainers = self.config.resources.train_ranks
        name, first, size = ("train", 0, trainers) if self.rank < trainers else ("rollout", trainers, self.ranks - trainers)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=2 * self.config.trainer.phase_timeout_s)  # the driver's own limit comes first
        dist.init_process_group(
            backend, store=PrefixStore(name, self.store), rank=self.rank - first, world_size=size, timeout=timeout)
        if self.ranks > trainers and (self.rank == 0 or self.rank >= trainers):
            place = max(0, self.rank - trainers + 1)
            self.channel = WeightChannel(self.store, place, self.ranks - trainers + 1, self.device, timeout)

    def build(self, role: str, request: RoleRequest, layout: Layout, total_updates: int | None, want: frozenset[str]) -> None:
        """Make this rank's worker of a role, in the place of one of that name."""
        self.drop(role)
        self._use(None)
        spec = RoleSpec(role, self.config.actor.backend, request, self.config, self.plugins, self.rank, self.device,
                        total_updates, want)
        self.workers[role] = self.plugins.make_worker(spec=spec, layout=layout)
        self.active = role

    def drop(self, role: str) -> None:
        """Let go of a role that the next stage does not need."""
        self.workers.pop(role, None)
        self.active = None if self.active == role else self.active

    def _use(self, role: str | None) -> Any:
        """A role's worker, its state on the device; the one used before gives up what its configuration says."""
        if self.active not in (None, role):
            self.workers[self.active].offload()
        if role is not None and self.active != role:
            self.workers[role].onload()
        self.active = role
        return None if role is None else self.workers[role]

    def forward(self, role: str, batch: Batch, want: AbstractSet[str], temperature: float) -> dict[str, torch.Tensor]:
        return {name: column.cpu() for name, column in self._use(role).forward(batch, want, temperature).items()}

    def update(
        self, role: str, batch: Batch, loss: Loss, denominators: Mapping[str, float], temperature: float, atom: Atom,
        keeps: bool = False,
    ) -> tuple[dict[str, Value], dict[str, torch.Tensor]]:
        """Metrics, and where the rank `keeps` them, the outputs of the update's own forward."""
        kept: dict[str, torch.Tensor] = {}
        return self._use(role).update(batch, loss, denominators, temperature, atom, kept if keeps else None), kept

    def start_engine(self) -> None:
        """Start this rank's engine, or its part of one, asleep: the models' memory is not taken by it."""
        engine_class = self.plugins.resolve("rollout", self.config.rollout.engine)
        engine: Rollout = engine_class(self.config, self.device, dist.get_rank())
        engine.sleep()
        self.engine = engine

    def sync_weights(self, version: int) -> None:
        """Give the actor's weights to the engine, here or over the channel; every rank takes part. Memory is given back
        before each of the engine's own demands for it."""
        if self.rank < self.config.resources.train_ranks:
            weights = self._use("actor").weights()
        else:
            assert self.channel is not None
            weights = self.channel.receive()
        if self.engine is None:
            if self.channel is not None:
                self.channel.send(weights)
            for _ in weights:  # on the other ranks: gathering takes all of them
                pass
            return
        empty_cache(self.device)
        self.engine.wake(["weights"])
        self.engine.load_weights(weights, version)
        self._use(None)
        empty_cache(self.device)
        self.engine.wake(["kv_cache"])

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        assert self.engine is not None
        return self.engine.generate(requests, params)

    def sleep_engine(self) -> None:
        assert self.engine is not None
        self.engine.sleep()

    def save(self, role: str, directory: str, contents: Sequence[str], background: bool) -> None:
        write = self.plugins.save_checkpoint(self._use(role), Path(directory), contents)
        if write is not None:  # in the background too, all ranks write one role after the other
            self.writes.append(self.writer.submit(write))
        if not background:
            self.finish_saving()

    def saved(self) -> bool:
        return all(write.done() for write in self.writes)

    def finish_saving(self) -> None:
        writes, self.writes = self.writes, []
        wait(writes)
        for write in writes:
            write.result()

    def load(self, role: str, directory: str, contents: Sequence[str]) -> None:
        self.plugins.load_checkpoint(self._use(role), Path(directory), contents)

    def begin_trace(self, step: int) -> None:
        self.end_trace = begin_trace(self.config, self.plugins, self.rank, step)

    def finish_trace(self) -> None:
        self.end_trace()

    def memory(self) -> dict[str, Value]:
        """Peak device memory so far, in GB; nothing on a CPU."""
        if self.device.type != "cuda":
            return {}
        return {"perf/max_memory_allocated_gb": Value(torch.cuda.max_memory_allocated(self.device) / 1e9),
                "perf/max_memory_reserved_gb": Value(torch.cuda.max_memory_reserved(self.device) / 1e9)}

    def close(self) -> None:
        self.writer.shutdown()
        self.workers.clear()
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if dist.is_initialized():
            dist.destroy_process_group()


def stacks() -> str:
    """The stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
                     for ident, frame in sys._current_frames().items())
