"""Memory of the device that is given up between phases, under the tensors that use it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Host:
    """Storages whose bytes wait in host memory. Tensors and views on them stay what they are, and meanwhile have no bytes."""

    def __init__(self) -> None:
        self.held: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def take(self, tensors: Iterable[Tensor], keep: bool = True) -> None:
        """Give up the memory under `tensors`, whole storages; without `keep`, their bytes too. Again: nothing happens."""
        for storage in storages(tensors).values():
            size, raw, copy = storage.nbytes(), _bytes(storage), None
            if not size:
                continue
            if keep:
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=raw.is_cuda)
                copy.copy_(raw, non_blocking=True)
            del raw
            storage.resize_(0)  # in the stream's order, like every use of the memory after it
            self.held.append((storage, size, copy))

    def give_back(self) -> None:
        """Bring all that was taken back; what was not kept is of any value."""
        for storage, size, copy in self.held:
            storage.resize_(size)
            if copy is not None:
                _bytes(storage).copy_(copy, non_blocking=True)
        self.held.clear()


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """What lies under tensors, each once."""
    return {storage._cdata: storage for storage in (x.untyped_storage() for x in tensors)}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
