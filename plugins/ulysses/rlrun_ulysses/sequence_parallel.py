"""A packed row over ranks: how it is cut, how a model's attention sees it whole, how outputs come together."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlrun.models.attention import enable_packed_attention
from rlrun_ulysses.exchange import Gather, to_heads, to_tokens
from rlrun_ulysses.heads import check_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "_ulysses_"
_numbers = count()


class Ulysses:
    """Sequence parallelism over the ranks of `group`; see `rlrun.workers.protocol.SequenceParallel`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def shard(self, row: Tensor) -> Tensor:
        """See `SequenceParallel.shard`: the row is filled up with zeros to a multiple of `size`."""
        return F.pad(row, (0, -row.shape[-1] % self.size)).chunk(self.size, -1)[self.rank]

    def gather(self, output: Tensor, total: int) -> Tensor:
        """See `SequenceParallel.gather`."""
        whole: Tensor = Gather.apply(self.group, output)
        return whole[:total]

    def attach(self, model: PreTrainedModel) -> None:
        """Let the attention that the model's language layers are configured with see whole rows. No other model changes, and
        a second call changes nothing. Raises ValueError for an attention that is not told where sequences begin, and for
        layers that read neighbouring tokens outside of attention."""
        detach(model)
        inner = model.config.get_text_config()._attn_implementation
        function = ALL_ATTENTION_FUNCTIONS.get(inner)
        if function is None or "packed" not in inspect.signature(function).parameters:
            raise ValueError(f"Ulysses spreads attention functions that take `packed`, the boundaries of sequences in a row; "
                             f"{type(model).__name__} is configured with {inner!r}, which does not")
        if any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules()):
            raise ValueError(f"{type(model).__name__} has convolutions over tokens, so its sequences cannot be cut over ranks: "
                             "ulysses.size must be 1")
        name = f"{inner}{_MARK}{next(_numbers)}"
        ALL_ATTENTION_FUNCTIONS[name] = self._around(function)
        weakref.finalize(model, ALL_ATTENTION_FUNCTIONS.pop, name, None)
        enable_packed_attention(model, name)

    def _around(self, inner: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, None]]:
        # Outside of compiled layers: the order of exchanges is that of this code on every rank, whatever a rank has compiled.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                      s_aux: Tensor | None = None, **options: Any) -> tuple[Tensor, None]:
            """transformers' attention interface on a part of a row: [1, H, T/P, D] in, [1, T/P, H, D] out."""
            check_heads(query.shape[1], key.shape[1], self.size, type(module).__name__)
            copies = max(1, self.size // key.shape[1])  # each rank takes whole heads; gradients of copies add up
            key, value = (x[0].repeat_interleave(copies, 0) if copies > 1 else x[0] for x in (key, value))
            parts = to_heads(self.group, query[0], key, value)
            if s_aux is not None:
                options["s_aux"] = s_aux.chunk(self.size)[self.rank]
            output, _ = inner(module, *(x.transpose(0, 1)[None] for x in parts), attention_mask, **options)
            return to_tokens(self.group, output[0])[None], None

        return attention


def detach(model: PreTrainedModel) -> None:
    """Give a model the attention back that it had before `attach`; nothing where it has that already."""
    name = model.config.get_text_config()._attn_implementation
    inner, mark, _ = name.rpartition(_MARK)
    if mark:
        enable_packed_attention(model, inner)
        ALL_ATTENTION_FUNCTIONS.pop(name, None)
