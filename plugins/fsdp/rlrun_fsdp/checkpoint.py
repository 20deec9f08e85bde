"""Checkpoints of FSDP workers through torch.distributed.checkpoint: they load at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rlrun.workers import saving
from rlrun.workers.saving import extra_state, load_extra, together, writers

if TYPE_CHECKING:
    from rlrun_fsdp.worker import FsdpWorker


class Staging:
    """Copies of a worker's state in host memory, so that it can be written while training goes on. Those of a GPU's state
    are in pinned memory, which is kept for the next time."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.stager = BlockingAsyncStager(cache_staged_state_dict=self.pinned)
        self.whole: dict[str, Tensor] = {}

    def weights(self, weights: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
        """Take all of `weights`, in lockstep with other ranks; copy them where `keep` is set."""
        for name, tensor in weights:
            if keep:
                if name not in self.whole:
                    self.whole[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
                self.whole[name].copy_(tensor, non_blocking=True)
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        copied, self.whole = self.whole, self.whole if self.pinned else {}
        return copied


def save(worker: FsdpWorker, directory: Path, contents: Sequence[str]) -> Callable[[], None]:
    """Take `contents` (model, optimizer, extra, hf_model), as copies where checkpoint.async_save is set. Collective.

    The function that is returned writes them; a failure on any rank raises there on all.
    """
    first, group = dist.get_rank() == 0, writers()
    state = _sharded_state(worker, contents)
    if state and worker.spec.config.checkpoint.async_save:
        state = worker.staging.stager.stage(state)
    extra = together(directory, group, lambda: _extra(worker)) if "extra" in contents else None
    whole = worker.staging.weights(worker.weights(), first) if "hf_model" in contents else None

    return partial(write, worker, directory, state, extra, whole)


def write(worker: FsdpWorker, directory: Path, state: dict[str, Any], extra: dict[str, Any] | None,
          whole: dict[str, Tensor] | None) -> None:
    """Write what `save` took."""
    def sharded() -> None:
        dcp_save(state, storage_writer=FileSystemWriter(directory, sync_files=True), process_group=writers())

    saving.write(worker.spec, directory, [sharded] if state else [], extra, whole)


def load(worker: FsdpWorker, directory: Path, contents: Sequence[str]) -> None:
    """Restore `contents`. The random states come back only at the number of ranks that wrote them; hyperparameters of
    the optimizer are those of the configuration, not those of the checkpoint."""
    state = _sharded_state(worker, contents)
    if state:
        dcp_load(state, storage_reader=FileSystemReader(directory))
    if "model" in state:
        sd.set_model_state_dict(worker.model, state["model"], options=_options(worker))
    if "optimizer" in state:
        assert worker.optimizer is not None
        groups = sd.get_optimizer_state_dict(worker.model, worker.optimizer)["param_groups"]
        sd.set_optimizer_state_dict(
            worker.model, worker.optimizer, {"state": state["optimizer"], "param_groups": groups})
    if "extra" in contents:
        worker.updates = load_extra(directory, worker.spec.device)["updates"]


def _sharded_state(worker: FsdpWorker, contents: Sequence[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = sd.get_model_state_dict(worker.model, options=_options(worker))
    if "optimizer" in contents and worker.optimizer is not None:
        state["optimizer"] = sd.get_optimizer_state_dict(worker.model, worker.optimizer)["state"]
    return state


def _options(worker: FsdpWorker) -> sd.StateDictOptions:
    """Of a model with adapters, these alone are kept."""
    return sd.StateDictOptions(ignore_frozen_params=worker.adapted, strict=not worker.adapted)


def _extra(worker: FsdpWorker) -> dict[str, Any]:
    return extra_state(worker.updates, worker.spec.device)
