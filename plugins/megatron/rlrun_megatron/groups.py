"""Megatron's process groups: global, so one arrangement a process, which all its models share."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rlrun_megatron.plugin import MegatronConfig

_arranged: tuple[dist.ProcessGroup, MegatronConfig] | None = None


def arrange(config: MegatronConfig, seed: int) -> None:
    """Make the groups for these sizes, unless they are there. Collective over all ranks that train."""
    global _arranged
    world = dist.distributed_c10d._get_default_group()
    if _arranged == (world, config):
        return
    if _arranged is not None:
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size, expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    _arranged = world, config
