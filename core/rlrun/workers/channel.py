"""Weights from the first training rank to ranks that only generate, whatever the backend and the engine."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

Item = TypeVar("Item")

BUCKET_BYTES = 256 << 20  # of tensors that cross together, between ranks or out of shards, unless a single one is larger
_ALIGNED = 16  # bytes that each tensor's place in a bucket is a multiple of, so that it can be viewed in its own dtype


class WeightChannel:
    """One sender (rank 0) and its receivers, in groups of their own beside the default ones: gloo, and NCCL on GPUs."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        gloo: Any = ProcessGroupGloo
        self.headers = gloo(PrefixStore("weights/cpu", store), rank, size, timeout)
        self.data: Any = self.headers
        if device.type == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.data = dist.ProcessGroupNCCL(PrefixStore("weights/cuda", store), rank, size, options)

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send all weights, in buckets of about `BUCKET_BYTES`: no second copy of the model exists."""
        for bucket in buckets(weights, lambda item: item[1].nbytes, BUCKET_BYTES):
            self._header([(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in bucket])
            self.data.broadcast(torch.cat([_padded(t.to(self.device)) for _, t in bucket]), 0).wait()
        self._header([])

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that are being sent."""
        while header := self._header(None):
            entries = [(name, getattr(torch, dtype), shape) for name, dtype, shape in header]
            sizes = [dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in entries]
            places = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
            flat = torch.empty(sum(places), dtype=torch.uint8, device=self.device)
            self.data.broadcast(flat, 0).wait()
            for (name, dtype, shape), size, part in zip(entries, sizes, flat.split(places), strict=True):
                yield name, part[:size].view(dtype).view(shape)

    def _header(self, entries: list[tuple[str, str, list[int]]] | None) -> list[tuple[str, str, list[int]]]:
        """Names, dtypes and shapes of the next bucket, from the sender to all; [] at the end."""
        text = torch.frombuffer(bytearray(json.dumps(entries or []).encode()), dtype=torch.uint8)
        length = torch.tensor([text.numel()])
        self.headers.broadcast(length, 0).wait()
        text = text if entries is not None else torch.empty(int(length), dtype=torch.uint8)
        self.headers.broadcast(text, 0).wait()
        return json.loads(bytes(text.tolist()))


def buckets(items: Iterable[Item], nbytes: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """The items in order, as many together as have at most `limit` bytes; a larger one alone."""
    bucket: list[Item] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket


def _padded(tensor: Tensor) -> Tensor:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -raw.numel() % _ALIGNED))
