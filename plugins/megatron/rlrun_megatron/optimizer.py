"""Megatron's optimizer and its wrapping for data parallelism, with the meaning that both have under other backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import megatron.core.optimizer
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlrun.config.schema import OptimConfig
from rlrun_megatron.model import Stage, made

# torch's AdamW also where TransformerEngine or apex bring one of their own: state and checkpoints are the same everywhere.
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
distrib_optimizer.HAVE_APEX_OR_TE = False


def wrap(stages: Sequence[Stage], transformer: TransformerConfig, distributed: bool,
         override: dict[str, Any]) -> list[DistributedDataParallel]:
    """Stages whose gradients are added over data-parallel ranks. Raises ValueError for what `override` may not say."""
    fields = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": distributed, "overlap_param_gather": False}
    config = made(DistributedDataParallelConfig, fields, override, "megatron.override_ddp_config")
    model = [DistributedDataParallel(transformer, config, stage, disable_bucketing=number > 0)
             for number, stage in enumerate(stages)]
    for buffer in buffers(model):
        # Megatron's checkpoints put buckets together without what fills them up, but look for parameters where they stand
        # with it: wrong wherever something is filled up.
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
    transformer.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    transformer.finalize_model_grads_func = _finalize
    return model


def buffers(model: Sequence[Any]) -> Iterator[Any]:
    """Megatron's buffers of gradients, and of parameters where the optimizer is distributed."""
    for chunk in model:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def make_optimizer(model: Sequence[DistributedDataParallel], optim: OptimConfig, dtype: torch.dtype, distributed: bool,
                   fused: bool) -> ChainedOptimizer:
    """What updates a wrapped model. Like under other backends, weight decay is for all parameters."""
    adam = optim.name == "adamw"
    config = OptimizerConfig(
        optimizer="adam" if adam else "sgd", lr=optim.lr, weight_decay=optim.weight_decay if adam else 0.0,
        adam_beta1=optim.betas[0], adam_beta2=optim.betas[1], adam_eps=optim.eps, sgd_momentum=0.0,
        bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=distributed, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, list(model), config_overrides={}, use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer):
            _load_with_step(part)
        for group in part.param_groups if fused and adam else ():
            group["fused"], group["foreach"] = True, False  # one pass over state and parameters, without memory of its own
    if adam:
        init_state(optimizer)
    return optimizer


def init_state(optimizer: ChainedOptimizer) -> None:
    """Give AdamW the state that it lacks, so that saving before the first step neither fails nor steps."""
    for part in optimizer.chained_optimizers:
        for p in part.get_parameters():
            state, place = part.optimizer.state[p], p.device if p.is_cuda else "cpu"
            # Loading gives all parameters one tensor of steps, which each of them would count up.
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).to(place, copy=True)
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(p))


def tensors(optimizer: ChainedOptimizer) -> Iterator[Tensor]:
    """Parameters as the optimizer has them, and its state."""
    for part in optimizer.chained_optimizers:
        for p in part.get_parameters():
            yield from (p, *part.optimizer.state[p].values())


def grads(optimizer: ChainedOptimizer) -> list[Tensor]:
    """Gradients as the optimizer has them: this rank's parts."""
    return [p.grad for part in optimizer.chained_optimizers for p in part.get_parameters() if p.grad is not None]


def grad_square(optimizer: ChainedOptimizer, device: torch.device) -> float:
    """Squared norm of the full gradient, each parameter counted once."""
    total, first = 0.0, parallel_state.get_tensor_model_parallel_rank() == 0
    for part in optimizer.chained_optimizers:
        # Tied weights of two stages are one parameter, and so is what tensor-parallel ranks hold alike.
        own = [p.grad for p in part.get_parameters() if p.grad is not None and not getattr(p, "shared", False)
               and (first or getattr(p, "tensor_model_parallel", False))]
        square = torch.zeros((), dtype=torch.float64, device=device)
        if own:
            square = torch.stack(torch._foreach_norm(own)).double().square().sum()
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        total += float(square)
    return total


def _load_with_step(optimizer: DistributedOptimizer) -> None:
    """Let a loaded state lack the number of steps, which Megatron restores before it, but looks for in it again where the
    optimizer is torch's AdamW."""
    fill, held = optimizer._set_main_param_and_optimizer_states, optimizer._get_main_param_and_optimizer_states

    def complete(parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        fill(parameter, {"step": held(parameter)["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = complete


def _finalize(model: list[Any], num_tokens: Tensor | None, **options: Any) -> None:
    """Add gradients over ranks. Losses are parts of the global one already, so nothing is divided by a number of tokens."""
    finalize_model_grads(model, None, **options)
