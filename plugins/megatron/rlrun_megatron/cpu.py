"""megatron-core where there is no GPU: a place for what it asks of one. For tests and tiny runs; never used on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Tensors that are made on "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        return func(*args, **kwargs)


def _cuda_name(tensor: Tensor, *args: Any, **options: Any) -> Any:
    """`Tensor.type`, with the names that Megatron's optimizers look for."""
    answer = _type(tensor, *args, **options)
    if not isinstance(answer, str) or answer.startswith("torch.cuda."):
        return answer
    return answer.replace("torch.", "torch.cuda.", 1)


_type = Tensor.type


class _Stream:
    """All work is in order already."""

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self


_STREAM = _Stream()


def _stream(*args: Any, **options: Any) -> _Stream:
    return _STREAM


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def _gather_uneven(outputs: list[Tensor], tensor: Tensor, group: Any = None, **options: Any) -> Any:
    """all_gather, also of tensors of several sizes, which gloo does not do."""
    if len({x.shape for x in outputs}) == 1:
        return _all_gather(outputs, tensor, group=group, **options)
    outputs[dist.get_rank(group)].copy_(tensor)
    for rank, x in enumerate(outputs):
        dist.broadcast(x, group_src=rank, group=group)
    return None


def _scatter_uneven(output: Tensor, inputs: list[Tensor], group: Any = None, **options: Any) -> Any:
    """The same of reduce_scatter, for sums."""
    if len({x.shape for x in inputs}) == 1:
        return _reduce_scatter(output, inputs, group=group, **options)
    for rank, x in enumerate(inputs):
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        if rank == dist.get_rank(group):
            output.copy_(summed)
    return None


def _nothing(*args: Any, **options: Any) -> None:
    pass


def _get_state(*args: Any, **options: Any) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, *args: Any, **options: Any) -> None:
    torch.set_rng_state(state)


@contextmanager
def emulated() -> Iterator[None]:
    """While this is entered, torch.cuda speaks of the CPU. Calls of megatron-core go inside, and nothing else."""
    import megatron.core.tensor_parallel.random as rng
    from megatron.core.transformer.moe import token_dispatcher

    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "Stream", _stream),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "current_stream", _stream),
        (torch.cuda, "get_rng_state", _get_state),
        (torch.cuda, "set_rng_state", _set_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (rng, "_get_cuda_rng_state", _get_state),
        (rng, "_set_cuda_rng_state", _set_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_cpu),
        (dist, "all_gather", _gather_uneven),
        (dist, "reduce_scatter", _scatter_uneven),
        (Tensor, "cuda", lambda tensor, *args, **options: tensor),
        (Tensor, "type", _cuda_name),
    ]
    with ExitStack() as stack:
        for place, name, value in changes:
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(_OnCpu())
        yield
