"""One attention for all models: causal, over packed sequences of any lengths, with the best kernel there is.

It is registered with transformers' attention interface under `NAME` and switched on model by model
(`model.set_attn_implementation(NAME)`). The caller hands `packed=Packed.of(cu_seqlens)` to the model's forward, which
passes it on to every layer; boundaries are never guessed from position ids or masks."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from rlrun.batch import to_device

NAME = "rlrun_packed"

# Known once, so that compiled layers need not ask.
_FLASH_ATTN = importlib.util.find_spec("flash_attn") is not None
_TAKES_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.12 and newer must be told of grouped queries; 2.11 does them unasked and knows no such argument."""


@dataclass(frozen=True)
class Packed:
    """Where sequences lie in a packed row; made once a forward, read by every layer."""

    cu_seqlens: Tensor  # [S+1] int32, on the row's device: sequence s is cu_seqlens[s]:cu_seqlens[s+1]
    runs: tuple[tuple[int, int], ...]
    """(count, length) of runs of neighbours of equal length: rows sorted by length make few, large runs."""
    max_length: int

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device | str | None = None, multiple_of: int = 1) -> Packed:
        """From boundaries [S+1]; cheapest where these are on the CPU. Empty sequences are left out, and what fills up the row
        to a multiple of `multiple_of` is one more."""
        lengths = [n for n in cu_seqlens.diff().tolist() if n > 0]
        lengths += [padding] if (padding := -sum(lengths) % multiple_of) else []
        runs = tuple((len(list(same)), length) for length, same in groupby(lengths))
        kept = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Packed(to_device(kept, device or cu_seqlens.device), runs, max(lengths, default=0))

    @property
    def total(self) -> int:
        return sum(count * length for count, length in self.runs)


def attend(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float | None = None, window: int | None = None,
           softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Causal attention within each packed sequence: [T, H, D] and twice [T, H_kv, D] -> [T, H, D].

    `window` is the number of tokens that a token sees, itself included; `softcap` bounds the scores by tanh; `sinks` [H] are
    scores of one more key without a value, which every token sees (gpt-oss, arXiv:2508.10925). On CUDA in half precision
    flash-attn, where installed, or torch's varlen_attn, neither of which knows sinks; otherwise SDPA, or with `softcap` or
    `sinks` a softmax of all scores, over sequences of equal length at once. Raises ValueError where the row and its boundaries
    disagree."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and sinks is None:
        if not torch.compiler.is_compiling():  # lengths in a compiled layer's conditions would compile it anew
            _check(query, key, packed)
        if _FLASH_ATTN:
            return _flash_attn(query, key, value, packed, scale, window, softcap)
        if softcap is None:
            return _varlen_attn(query, key, value, packed, scale, window)
    return _segments(query, key, value, packed, scale, window, softcap, sinks)


def _check(query: Tensor, key: Tensor, packed: Packed) -> None:
    if query.shape[0] != packed.total or key.shape[0] != packed.total:
        raise ValueError(f"packed sequences have {packed.total} tokens together, but attention got {query.shape[0]} "
                         f"queries and {key.shape[0]} keys: a key-value cache or padding cannot be used here")


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float | None, window: int | None,
                softcap: float | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func(
        query, key, value, packed.cu_seqlens, packed.cu_seqlens, packed.max_length, packed.max_length, softmax_scale=scale,
        causal=True, window_size=((window or 0) - 1, 0), softcap=softcap or 0.0)


def _varlen_attn(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float | None, window: int | None) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "window_size": ((window or 0) - 1, 0)}
    if _TAKES_ENABLE_GQA:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    output = varlen_attn(query, key, value, packed.cu_seqlens, packed.cu_seqlens, packed.max_length, packed.max_length, **options)
    assert isinstance(output, Tensor)
    return output


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the loop over lengths would be compiled anew for each row
def _segments(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float | None, window: int | None,
              softcap: float | None, sinks: Tensor | None) -> Tensor:
    """SDPA, one call for each run of sequences of equal length: no padding, no mask over the whole row."""
    _check(query, key, packed)
    if window is not None and window >= packed.max_length:
        window = None
    sizes = [count * length for count, length in packed.runs]
    outputs = []
    for run, *parts in zip(packed.runs, *(x.split(sizes) for x in (query, key, value))):
        q, k, v = (x.unflatten(0, run).transpose(1, 2) for x in parts)  # [count, heads, length, D]
        length = run[1]
        if softcap is not None or sinks is not None:
            output = _all_scores(q, k, v, scale, window, softcap, sinks)
        elif window is not None and length > window:
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=_visible(length, window, q.device), scale=scale, enable_gqa=True)
        else:
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if outputs else torch.zeros_like(query)


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length] bool: which keys (columns) each query (row) sees."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _all_scores(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, softcap: float | None,
                sinks: Tensor | None) -> Tensor:
    """What SDPA does not do: [count, H, length, D] and twice [count, H_kv, length, D] -> [count, H, length, D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible(query.shape[2], window, query.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    at_least_fp32 = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=at_least_fp32)[..., :key.shape[2]]
    return weights.to(value.dtype) @ value


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, packed: Packed | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, dropout: float = 0.0,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface on `attend`: [1, H, T, D] in, [1, T, H, D] out.

    Raises ValueError for what packed attention does not do: masks, dropout, attention to later tokens, a forward without
    `packed`, a key-value cache."""
    name = type(module).__name__
    if packed is None:
        raise ValueError(f"{name}: packed attention needs packed=Packed.of(cu_seqlens) in the call of the model")
    refused = {
        "an attention mask": attention_mask is not None,
        "attention dropout": dropout != 0.0,
        "attention to later tokens": not getattr(module, "is_causal", True),
        "more than one row": query.shape[0] != 1,
    }
    for what, given in refused.items():
        if given:
            raise ValueError(f"{name}: packed attention does not support {what}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packed, scaling, sliding_window, softcap, s_aux)[None], None


def enable_packed_attention(model: PreTrainedModel, name: str = NAME) -> None:
    """Switch a transformers model's language layers to packed attention (or to another registered implementation `name`); a
    vision tower beside them keeps its own.

    Raises ValueError for a model whose attention cannot be replaced."""
    config, text = model.config, model.config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key) is text]
    model.set_attn_implementation({keys[0]: name} if keys else name)
    if text._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} does not take its attention from transformers' attention interface, "
                         "so sequences cannot be packed: choose a model that does")


AttentionInterface.register(NAME, packed_attention)
