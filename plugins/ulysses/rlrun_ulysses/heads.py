"""Which models can be spread over how many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKENWISE = {"full_attention", "sliding_attention"}
"""Kinds of layers that read other tokens in their attention alone."""


def fits(query_heads: int, kv_heads: int, size: int) -> bool:
    """Whether `size` ranks can take equal parts of the query heads, and of the key-value heads or of copies of them."""
    return query_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def check_heads(query_heads: int, kv_heads: int, size: int, where: str) -> None:
    """Raises ValueError for head counts that `size` ranks cannot share, with the sizes that would work."""
    if not fits(query_heads, kv_heads, size):
        works = [str(n) for n in range(1, query_heads + 1) if fits(query_heads, kv_heads, n)]
        raise ValueError(f"ulysses.size = {size} does not fit {where} with {query_heads} query heads and {kv_heads} key-value "
                         f"heads: take {', '.join(works)}")


def check_model(config: PretrainedConfig, size: int, where: str) -> None:
    """Raises ValueError for a model whose language layers cannot be computed on parts of sequences, except attention."""
    text = config.get_text_config()
    query_heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or query_heads
    if isinstance(query_heads, int) and isinstance(kv_heads, int):
        check_heads(query_heads, kv_heads, size, where)
    if mixing := set(getattr(text, "layer_types", None) or ()) - TOKENWISE:
        raise ValueError(f"{where}: layers of kind {', '.join(sorted(mixing))} read other tokens outside of attention, so its "
                         "sequences cannot be cut over ranks: ulysses.size must be 1")
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if longest := kinds & {"dynamic", "longrope"}:
        raise ValueError(f"{where}: rope_type {', '.join(sorted(longest))} depends on the longest position in a forward, but "
                         "each rank sees only a part: ulysses.size must be 1")
