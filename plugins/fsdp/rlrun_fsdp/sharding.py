"""Models over ranks: only the first one reads weights, all hold their shards, and whole tensors are put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlrun.models.loading import empty_policy, load_policy
from rlrun.workers.channel import BUCKET_BYTES, buckets

if TYPE_CHECKING:
    from rlrun.models.policy import PolicyModel
    from rlrun.workers.protocol import RoleSpec

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 has another name for it."""


def load_first(spec: RoleSpec, dtype: torch.dtype) -> PolicyModel:
    """The role's model on rank 0, with its weights, and the same on the meta device of all other ranks.

    Raises ValueError on every rank where rank 0 cannot load it.
    """
    path, head, first = spec.request.path, spec.request.head, dist.get_rank() == 0
    assert path is not None
    model = None
    about: list[Any] = [None, None, None]
    if first:
        try:
            model = load_policy(path, head, dtype, seed=spec.config.run.seed)
            types = [x.dtype for x in [*model.parameters(), *model.buffers()]]
            about = [None, types, getattr(model.model, "_weight_conversions", None)]
        except ValueError as error:
            about = [str(error), None, None]
    dist.broadcast_object_list(about, 0)
    message, types, conversions = about
    if message is not None:
        raise ValueError(message)
    if model is None:
        model = empty_policy(path, head, dtype)
        model.model._weight_conversions = conversions
        for x, kept in zip([*model.parameters(), *model.buffers()], types or ()):
            x.data = x.data.to(kept)  # some models keep some parameters in float32
    return model


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory without content; tied parameters stay one."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is None or not x.is_meta:
                    continue
                if id(x) not in made:
                    empty = torch.empty_like(x, device=device)
                    made[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
                tensors[name] = made[id(x)]  # type: ignore[assignment]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved too, tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def fill(model: nn.Module, whole: dict[str, Tensor], device: torch.device) -> None:
    """Give every rank its shards of rank 0's tensors: `whole`, which is not read on other ranks."""
    for name, x in tensors_of(model).items():
        first = dist.get_rank() == 0
        sent = whole[name].detach().to(device) if first else torch.empty(x.shape, dtype=x.dtype, device=device)
        dist.broadcast(sent, 0)
        if first:
            continue
        if isinstance(x, DTensor):
            mine = distribute_tensor(sent, x.device_mesh, x.placements, src_data_rank=None)
            x.to_local().copy_(mine.to_local())
        else:
            x.copy_(sent)


def gather(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Whole tensors of shards over `group` (by the first dimension, as FSDP2 cuts them), in order and in `dtype`, on
    `device`; many at a time. Collective: every rank must take them all."""
    for bucket in buckets(tensors, lambda x: x.numel() * dtype.itemsize, BUCKET_BYTES):
        yield from _gather(bucket, dtype, device, group)


def _gather(tensors: list[Tensor], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Iterator[Tensor]:
    ranks = dist.get_world_size(group)
    local = [x.to_local().detach() if isinstance(x, DTensor) else x.detach() for x in tensors]
    local = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in local]
    sharded = [i for i, x in enumerate(tensors) if isinstance(x, DTensor) and ranks > 1]
    if not sharded:
        yield from local
        return
    rows = {i: -(-tensors[i].shape[0] // ranks) for i in sharded}
    widths = {i: tensors[i].numel() // max(tensors[i].shape[0], 1) for i in sharded}
    mine = torch.zeros(sum(rows[i] * widths[i] for i in sharded), dtype=dtype, device=device)
    parts = mine.split([rows[i] * widths[i] for i in sharded])
    for i, part in zip(sharded, parts):
        part[:local[i].numel()] = local[i].flatten()
    everyones = mine.new_empty(ranks * mine.numel())
    _all_gather(everyones, mine, group=group)
    split = iter(everyones.view(ranks, -1).split([rows[i] * widths[i] for i in sharded], dim=1))
    for i, x in enumerate(tensors):
        if i in rows:
            yield next(split).reshape(ranks * rows[i], *x.shape[1:])[:x.shape[0]]
        else:
            yield local[i]
