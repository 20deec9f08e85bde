"""What backends need to save their workers: ranks that succeed or fail together, and what all of them keep alike."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlrun.checkpoint import flush
from rlrun.models.loading import export
from rlrun.workers.protocol import RoleSpec

Result = TypeVar("Result")

_FULL_BYTES = 1 << 20  # a disk with less room than this is full
# what torch.save and safetensors say where a write fails; at a quota the disk itself is not full
_WRITER_ERRORS = ("inline_container.cc", "os error ")


def writers() -> dist.ProcessGroup:
    """All ranks once more, for what they say to each other while they write beside training. Collective."""
    return _writers(dist.distributed_c10d._get_default_group())


@cache
def _writers(world: dist.ProcessGroup) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def together(directory: Path, group: dist.ProcessGroup, action: Callable[[], Result]) -> Result:
    """Do something on each rank; where it fails on any, raise on all: OSError where the disk of `directory` is to blame."""
    error: BaseException | None = None
    try:
        result = action()
    except (Exception, CheckpointException) as failed:  # noqa: BLE001 - raised below, after the other ranks know
        error = failed
    failures: list[tuple[str, bool] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, (repr(error), _of_disk(error, directory)) if error else None, group=group)
    for rank, failure in enumerate(failures):
        if failure is not None and failure[1]:
            raise OSError(f"{directory} could not be written by rank {rank}: {failure[0]}") from error
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"saving failed on rank {rank}: {failure[0]}")
    return result


def _of_disk(error: BaseException, directory: Path) -> bool:
    """Whether the disk failed, and not we. PyTorch and safetensors report a full one by errors of other types."""
    failures = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    full = directory.exists() and shutil.disk_usage(directory).free < _FULL_BYTES
    return full or any(isinstance(one, OSError) or any(text in str(one) for text in _WRITER_ERRORS) for one in failures)


def write(spec: RoleSpec, directory: Path, parts: Iterable[Callable[[], object]], extra: Mapping[str, Any] | None,
          whole: Mapping[str, Tensor] | None) -> None:
    """Write a worker's state: each of the backend's own `parts` on all ranks, every rank's `extra`, and the first rank's whole
    weights as a model folder. Collective; a failure on any rank raises on all."""
    first, group = dist.get_rank() == 0, writers()
    together(directory, group, lambda: directory.mkdir(parents=True, exist_ok=True))
    for part in parts:
        together(directory, group, part)
    if extra is not None:
        together(directory, group, lambda: torch.save(extra, _extra_path(directory, dist.get_rank())))
    if whole is not None:
        source, tokenizer = spec.request.path or spec.config.model.path, spec.config.model.tokenizer or spec.config.model.path
        together(directory, group, lambda: export(whole.items(), directory / "hf", source, tokenizer) if first else None)
    together(directory, group, lambda: flush(directory) if first else None)


def extra_state(updates: int, device: torch.device) -> dict[str, Any]:
    """What a rank keeps besides model and optimizer."""
    return {"updates": updates, "ranks": dist.get_world_size(), "random": random_state(device)}


def load_extra(directory: Path, device: torch.device) -> dict[str, Any]:
    """This rank's extra state, or the first one's where there were fewer ranks. Its random states are brought back where as many
    ranks wrote them as there are now."""
    own = _extra_path(directory, dist.get_rank())
    extra: dict[str, Any] = torch.load(own if own.is_file() else _extra_path(directory, 0), weights_only=True)
    if extra["ranks"] == dist.get_world_size():
        set_random_state(extra["random"], device)
    return extra


def _extra_path(directory: Path, rank: int) -> Path:
    return directory / f"extra_{rank}.pt"


def random_state(device: torch.device) -> dict[str, Any]:
    """This process's random states, as torch.load(weights_only=True) reads them."""
    name, keys, *rest = np.random.get_state()
    numbers = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    states = {"python": random.getstate(), "numpy": (name, numbers, *rest), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, Any], device: torch.device) -> None:
    """Bring back what `random_state` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
