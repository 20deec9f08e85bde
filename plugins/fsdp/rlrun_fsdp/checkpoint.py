"""Checkpoints of FSDP workers through torch.distributed.checkpoint: they load at any number of ranks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rlrun.models.loading import export

if TYPE_CHECKING:
    from rlrun_fsdp.worker import FsdpWorker

_FULL_BYTES = 1 << 20
"""A disk with less room than this is full."""
_WRITER_ERRORS = ("inline_container.cc", "os error ")
"""What torch.save and safetensors say where a write fails; at a quota the disk itself is not full."""


def save(worker: FsdpWorker, directory: Path, contents: Sequence[str]) -> None:
    """Write `contents` (model, optimizer, extra, hf_model). Collective; a failure on any rank raises on all."""
    _together(directory, lambda: directory.mkdir(parents=True, exist_ok=True))
    state = _sharded_state(worker, contents)
    if state:
        _together(directory, lambda: dcp_save(state, storage_writer=FileSystemWriter(directory, sync_files=True)))
    if "extra" in contents:
        _together(directory, lambda: torch.save(_extra(worker), _extra_path(directory, dist.get_rank())))
    if "hf_model" in contents:
        first = dist.get_rank() == 0
        weights = [(name, tensor.cpu()) for name, tensor in worker.weights() if first]
        _together(directory, lambda: _export(worker, weights, directory / "hf") if first else None)


def _export(worker: FsdpWorker, weights: list[tuple[str, Tensor]], directory: Path) -> None:
    model = worker.spec.config.model
    export(weights, directory, worker.spec.request.path or model.path, model.tokenizer or model.path)


def load(worker: FsdpWorker, directory: Path, contents: Sequence[str]) -> None:
    """Restore `contents`. The random states come back only at the number of ranks that wrote them; hyperparameters of
    the optimizer are those of the configuration, not those of the checkpoint."""
    state = _sharded_state(worker, contents)
    if state:
        dcp_load(state, storage_reader=FileSystemReader(directory))
    if "model" in state:
        sd.set_model_state_dict(worker.model, state["model"])
    if "optimizer" in state:
        assert worker.optimizer is not None
        groups = sd.get_optimizer_state_dict(worker.model, worker.optimizer)["param_groups"]
        sd.set_optimizer_state_dict(
            worker.model, worker.optimizer, {"state": state["optimizer"], "param_groups": groups})
    if "extra" in contents:
        own = _extra_path(directory, dist.get_rank())
        extra = torch.load(own if own.is_file() else _extra_path(directory, 0), weights_only=True)
        worker.updates = extra["updates"]
        if extra["ranks"] == dist.get_world_size():
            _set_random_state(extra["random"], worker.spec.device)


def _sharded_state(worker: FsdpWorker, contents: Sequence[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = sd.get_model_state_dict(worker.model)
    if "optimizer" in contents and worker.optimizer is not None:
        state["optimizer"] = sd.get_optimizer_state_dict(worker.model, worker.optimizer)["state"]
    return state


def _together(directory: Path, action: Callable[[], object]) -> None:
    """Do something on each rank; where it fails on any, raise on all: OSError where a disk is to blame."""
    error: BaseException | None = None
    try:
        action()
    except (Exception, CheckpointException) as failed:  # noqa: BLE001 - raised below, after the other ranks know
        error = failed
    failures: list[tuple[str, bool] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, (repr(error), _of_disk(error, directory)) if error else None)
    for rank, failure in enumerate(failures):
        if failure is not None and failure[1]:
            raise OSError(f"{directory} could not be written by rank {rank}: {failure[0]}") from error
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"saving failed on rank {rank}: {failure[0]}")


def _of_disk(error: BaseException, directory: Path) -> bool:
    """Whether the disk failed, and not we. PyTorch and safetensors report a full one by errors of other types."""
    failures = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    full = directory.exists() and shutil.disk_usage(directory).free < _FULL_BYTES
    return full or any(isinstance(one, OSError) or any(text in str(one) for text in _WRITER_ERRORS) for one in failures)


def _extra_path(directory: Path, rank: int) -> Path:
    return directory / f"extra_{rank}.pt"


def _extra(worker: FsdpWorker) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    numbers = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    states = {"python": random.getstate(), "numpy": (name, numbers, *rest), "torch": torch.get_rng_state()}
    if worker.spec.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(worker.spec.device)
    return {"updates": worker.updates, "ranks": dist.get_world_size(), "random": states}


def _set_random_state(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
