"""Context parallelism by exchange: ranks hold parts of the row outside of attention, and parts of the heads within it.

Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509), section 3.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def to_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, from this rank's tokens of all heads: [T/P, H, D] -> [T, H/P, D]. Keys and values of
    fewer heads are repeated."""
    group = parallel_state.get_context_parallel_group()
    repeats = group.size() // gcd(group.size(), key.shape[1])
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return _Exchange.apply(query, group, True), _Exchange.apply(key, group, True), _Exchange.apply(value, group, True)


def to_tokens(output: Tensor) -> Tensor:
    """The inverse, of attention's output: [T, H/P, D] -> [T/P, H, D]."""
    return _Exchange.apply(output, parallel_state.get_context_parallel_group(), False)


def whole_row(part: Tensor) -> Tensor:
    """The row [T] of all ranks' parts [T/P], on every rank. What is computed of it must be the same on all, so that each
    takes its own part of the gradient, without a sum over ranks."""
    group = parallel_state.get_context_parallel_group()
    return part if group.size() == 1 else _Gather.apply(part, group)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send slice p of the first dimension to rank p; slice p of the result is rank p's."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def _split_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _exchange(x.unflatten(1, (group.size(), -1)).transpose(0, 1), group).flatten(0, 1)


def _split_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _exchange(x.unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """One of the two above, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.arguments = group, not to_heads
        return _split_heads(x, group) if to_heads else _split_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group, to_heads = ctx.arguments
        return _split_heads(grad, group) if to_heads else _split_tokens(grad, group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty(group.size() * part.shape[0])
        dist.all_gather(list(whole.chunk(group.size())), part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None
