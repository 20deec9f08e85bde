"""The two exchanges around attention: one for queries, keys and values together, one for the output.

Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509), section 3. P ranks each hold T/P tokens of all heads before and after
attention, and all T tokens of 1/P of the heads within it. Ranks' parts of the row follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def to_heads(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """All tokens of this rank's heads, from this rank's tokens of all heads: each [H, T/P, D] -> [T, H/P, D].

    One all-to-all for all tensors; P must divide each H.
    """
    return _ToHeads.apply(group, *tensors)


def to_tokens(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """The inverse for one tensor: [T, H/P, D] -> [T/P, H, D]."""
    return _ToTokens.apply(group, tensor)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ranks = dist.get_world_size(group)
        parts = [x.unflatten(0, (ranks, -1)).transpose(1, 2) for x in tensors]  # [P, T/P, H/P, D]
        return tuple(x.flatten(0, 1) for x in _swap(group, parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks = dist.get_world_size(ctx.group)
        received = _swap(ctx.group, [x.unflatten(0, (ranks, -1)) for x in grads])
        return None, *(x.transpose(1, 2).flatten(0, 1) for x in received)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        ctx.group = group
        [received] = _swap(group, [tensor.unflatten(0, (dist.get_world_size(group), -1))])
        return received.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        parts = grad.unflatten(1, (dist.get_world_size(ctx.group), -1)).transpose(0, 1)
        [received] = _swap(ctx.group, [parts])
        return None, received.flatten(0, 1)


def _swap(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Send tensors' slice p of the first dimension to rank p; slice p of the results is rank p's. All in one all-to-all."""
    ranks, tokens = tensors[0].shape[:2]
    widths = [x.shape[2] * x.shape[3] for x in tensors]
    sent = tensors[0].new_empty(ranks, tokens, sum(widths))
    for part, x in zip(sent.split(widths, -1), tensors):
        part.unflatten(-1, x.shape[2:]).copy_(x)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return [part.unflatten(-1, x.shape[2:]) for part, x in zip(received.split(widths, -1), tensors)]


class Gather(torch.autograd.Function):
    """Parts of a column, [T/P] each, put together on every rank: [T]. What all ranks compute of it must be the same, so
    that each takes its own part of the gradient, without a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: Tensor) -> Tensor:
        ctx.group, ctx.size = group, part.shape[0]
        whole = part.new_empty(dist.get_world_size(group) * part.shape[0])
        dist.all_gather(list(whole.split(part.shape[0])), part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.split(ctx.size)[dist.get_rank(ctx.group)]
