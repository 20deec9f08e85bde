"""Checkpoints of Megatron workers in the format torch_dist of mcore's dist_checkpointing: they load in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rlrun.workers import saving
from rlrun.workers.saving import extra_state, load_extra, together, writers
from rlrun_megatron.model import Head, Stage
from rlrun_megatron.optimizer import init_state
from rlrun_megatron.weights import place_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    parts: list[Callable[[], object]] = []
    if taken is not None:
        sharded, common = taken
        parts = [lambda: _sharded(sharded, directory), lambda: _common(common, directory) if dist.get_rank() == 0 else None]
    saving.write(worker.spec, directory, parts, extra, whole)


def load(worker: MegatronWorker, directory: Path, contents: Sequence[str]) -> None:
    """Restore `contents`. The random states come back only at the number of ranks that wrote them; hyperparameters of
    the optimizer are those of the configuration, not those of the checkpoint."""
    with worker.on_device():
        state = _sharded_state(worker, contents, loading=True)
        loaded = dist_checkpointing.load(state, str(directory)) if state else {}
        if "model" in contents:
            for number, stage in enumerate(worker.stages):
                stage.load_state_dict(loaded[f"model{number}"])
        if "optimizer" in state:  # what is loaded has the optimizer's number of steps in any case
            _load_optimizer(worker, loaded["optimizer"])
        elif worker.optimizer is not None:
            worker.optimizer.reload_model_params()
    if "extra" in contents:
        extra = load_extra(directory, worker.spec.device)
        worker.updates = extra["updates"]
        if extra["ranks"] == dist.get_world_size():
            get_cuda_rng_tracker().set_states(extra["megatron"])


def load_initial(stages: Sequence[Stage], hf: PretrainedConfig, head: Head, path: str) -> bool:
    """Fill the model from a checkpoint of Megatron's, ours or one of Megatron-LM's; whether its head was there too: a value head
    is always a fresh one. Raises ValueError where the checkpoint is not of this model."""
    place_of(stages, hf, head)
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise ValueError(f"megatron.dist_checkpointing_path: {path} has no checkpoint of format torch_dist (metadata.json)")
    state = _models(stages)
    if head == "value":
        for tensors in state.values():
            for name in [name for name in tensors if name.startswith("output_layer.")]:
                del tensors[name]
    try:
        loaded = dist_checkpointing.load(dict(state), path)
    except (dist_checkpointing.core.CheckpointingException, CheckpointException, KeyError) as error:
        raise ValueError(f"megatron.dist_checkpointing_path: {path} is not of this model: {error}") from error
    for number, stage in enumerate(stages):
        stage.load_state_dict(loaded[f"model{number}"], strict=head != "value")
    return head != "value"


def _models(stages: Sequence[Stage]) -> dict[str, Any]:
    return {f"model{number}": stage.sharded_state_dict(metadata=_metadata()) for number, stage in enumerate(stages)}


def _metadata() -> dict[str, Any]:
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _sharded_state(worker: MegatronWorker, contents: Sequence[str], loading: bool) -> dict[str, Any]:
    models = _models(worker.stages)
    state = dict(models) if "model" in contents else {}
    if "optimizer" in contents and worker.optimizer is not None and worker.optim.name == "adamw":
        state["optimizer"] = worker.optimizer.sharded_state_dict(models, is_loading=loading, metadata=_metadata())
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


def _sharded(sharded: dict[str, Any], directory: Path) -> None:
    # Like mcore's own writer, but in this thread, over a group of its own, and without forking the process.
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    dcp_save(sharded, storage_writer=FileSystemWriter(directory, sync_files=True), planner=planner, process_group=writers())


def _common(common: dict[str, Any], directory: Path) -> None:
    torch.save(common, directory / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def _load_optimizer(worker: MegatronWorker, state: dict[str, Any]) -> None:
    assert worker.optimizer is not None
    own = {_kind(group): {k: v for k, v in group.items() if k not in ("params", "step")}
           for group in worker.optimizer.param_groups}
    for part in [state] if "param_groups" in state or "optimizer" in state else state.values():
        inner = part.get("optimizer", part)
        for group in inner["param_groups"]:  # the configuration's rates, by which mcore 0.19 also tells groups apart
            group.update(own[_kind(group)])
        if "state" in inner:  # steps are not saved where there were none
            inner["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))
    worker.optimizer.load_state_dict(state)
    init_state(worker.optimizer)


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in ("wd_mult", "is_expert_parallel"))


def _extra(worker: MegatronWorker) -> dict[str, Any]:
    return extra_state(worker.updates, worker.spec.device) | {"megatron": get_cuda_rng_tracker().get_states()}
