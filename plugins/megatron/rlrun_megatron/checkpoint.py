"""Checkpoints of Megatron workers in the format torch_dist of mcore's dist_checkpointing: they load in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rlrun.checkpoint import flush
from rlrun.models.loading import export
from rlrun.workers.saving import random_state, set_random_state, together, writers

if TYPE_CHECKING:
    from rlrun_megatron.worker import MegatronWorker


def save(worker: MegatronWorker, directory: Path, contents: Sequence[str]) -> Callable[[], None]:
    """Take `contents` (model, optimizer, extra, hf_model), as copies where checkpoint.async_save is set. Collective.

    The function that is returned writes them; a failure on any rank raises there on all.
    """
    first, group = dist.get_rank() == 0, writers()
    copy = worker.spec.config.checkpoint.async_save
    with worker.on_device():
        taken = _taken(_sharded_state(worker, contents, loading=False), copy)
    extra = together(directory, group, lambda: _extra(worker)) if "extra" in contents else None
    whole = None
    if "hf_model" in contents:
        whole = {}
        for name, tensor in worker.weights():  # all ranks take part
            if first:
                whole[name] = tensor.to("cpu", copy=True)
    return partial(write, worker, directory, taken, extra, whole)


def write(worker: MegatronWorker, directory: Path, taken: tuple[dict[str, Any], dict[str, Any]] | None,
          extra: dict[str, Any] | None, whole: dict[str, Tensor] | None) -> None:
    """Write what `save` took."""
    first, group = dist.get_rank() == 0, writers()
    together(directory, group, lambda: directory.mkdir(parents=True, exist_ok=True))
    if taken is not None:
        sharded, common = taken
        # Like mcore's own writer, but in this thread, over a group of its own, and without forking the process.
        writer, planner = FileSystemWriter(directory, sync_files=True), MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False)
        together(directory, group, lambda: dcp_save(sharded, storage_writer=writer, planner=planner, process_group=group))
        together(directory, group, lambda: _common(common, directory) if first else None)
    if extra is not None:
        together(directory, group, lambda: torch.save(extra, _extra_path(directory, dist.get_rank())))
    if whole is not None:
        together(directory, group, lambda: _export(worker, whole, directory / "hf") if first else None)
    together(directory, group, lambda: flush(directory) if first else None)


def load(worker: MegatronWorker, directory: Path, contents: Sequence[str]) -> None:
    """Restore `contents`. The random states come back only at the number of ranks that wrote them; hyperparameters of
    the optimizer are those of the configuration, not those of the checkpoint."""
    with worker.on_device():
        state = _sharded_state(worker, contents, loading=True)
        loaded = dist_checkpointing.load(state, str(directory)) if state else {}
        if "model" in contents:
            for number, stage in enumerate(worker.stages):
                stage.load_state_dict(loaded[f"model{number}"])
        if "optimizer" in loaded:
            _load_optimizer(worker, loaded["optimizer"])
        elif worker.optimizer is not None:
            worker.optimizer.reload_model_params()
    if "extra" in contents:
        own = _extra_path(directory, dist.get_rank())
        extra = torch.load(own if own.is_file() else _extra_path(directory, 0), weights_only=True)
        worker.updates = extra["updates"]
        if extra["ranks"] == dist.get_world_size():
            set_random_state(extra["random"], worker.spec.device)
            get_cuda_rng_tracker().set_states(extra["megatron"])


def _sharded_state(worker: MegatronWorker, contents: Sequence[str], loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
                "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    models = {f"model{number}": stage.sharded_state_dict(metadata=metadata) for number, stage in enumerate(worker.stages)}
    state = dict(models) if "model" in contents else {}
    if "optimizer" in contents and worker.optimizer is not None and worker.optim.name == "adamw":
        state["optimizer"] = worker.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)
    return state


def _taken(state: dict[str, Any], copy: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What ranks share out among them, in torch's terms, and what all have alike."""
    if not state:
        return None
    sharded, common = save_preprocess(state)
    if copy:
        for tensor in nested_values(sharded):
            if isinstance(tensor, ShardedTensor) and tensor.data is not None:
                tensor.data = tensor.data.detach().to("cpu", copy=True)
    renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(renamed, False), common


def _common(common: dict[str, Any], directory: Path) -> None:
    torch.save(common, directory / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def _load_optimizer(worker: MegatronWorker, state: dict[str, Any]) -> None:
    assert worker.optimizer is not None
    own = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in worker.optimizer.param_groups]
    for part in [state] if "param_groups" in state or "optimizer" in state else state.values():
        inner = part.get("optimizer", part)
        if "state" in inner:  # steps are not saved where there were none
            inner["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))
    worker.optimizer.load_state_dict(state)
    for group, values in zip(worker.optimizer.param_groups, own):
        group.update(values)
    worker.init_state()


def _export(worker: MegatronWorker, weights: dict[str, Tensor], directory: Path) -> None:
    model = worker.spec.config.model
    export(weights.items(), directory, worker.spec.request.path or model.path, model.tokenizer or model.path)


def _extra_path(directory: Path, rank: int) -> Path:
    return directory / f"extra_{rank}.pt"


def _extra(worker: MegatronWorker) -> dict[str, Any]:
    return {"updates": worker.updates, "ranks": dist.get_world_size(), "random": random_state(worker.spec.device),
            "megatron": get_cuda_rng_tracker().get_states()}
