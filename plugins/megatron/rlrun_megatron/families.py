"""The models that this backend builds, and the sizes that fit them. Imports nothing of Megatron's."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rlrun_megatron.plugin import MegatronConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """What sets one family of models apart from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


FAMILIES = {
    "llama": Family(), "mistral": Family(), "qwen2": Family(qkv_bias=True), "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
}
"""By `model_type`."""
_ROPES = ("default", "linear", "llama3")


def bridged(hf: PretrainedConfig) -> bool:
    """Whether a model is none of ours, but perhaps one of Megatron-Bridge's. Raises ValueError where that is not installed."""
    if hf.model_type in FAMILIES:
        return False
    try:
        if importlib.util.find_spec("megatron.bridge"):
            return True
    except ModuleNotFoundError:
        pass
    raise ValueError(f"the megatron backend has no {hf.model_type!r} models; it has {', '.join(FAMILIES)}: take another "
                     "backend, or pip install megatron-bridge, which may know them")


def family_of(hf: PretrainedConfig) -> Family:
    """Raises ValueError for models that this backend cannot build itself."""
    rope = hf.rope_parameters["rope_type"]
    refused = {
        f"hidden_act {hf.hidden_act!r}": hf.hidden_act != "silu",
        "attention_bias": getattr(hf, "attention_bias", False),
        "mlp_bias": getattr(hf, "mlp_bias", False),
        f"rope_type {rope!r}": rope not in _ROPES,
        "layers without experts": getattr(hf, "decoder_sparse_step", 1) != 1 or getattr(hf, "mlp_only_layers", None),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"the megatron backend does not support {what} of a {hf.model_type} model: take another backend")
    return FAMILIES[hf.model_type]


def head_size(hf: PretrainedConfig) -> int:
    size: int = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return size


def check_sizes(hf: PretrainedConfig, config: MegatronConfig) -> None:
    """Raises ValueError where a model cannot be cut as the configuration says. What Megatron-Bridge builds, that checks."""
    if bridged(hf):
        if config.context_parallel_size > 1:
            raise ValueError(f"megatron.context_parallel_size > 1 is not supported for {hf.model_type} models")
        return
    family = family_of(hf)
    tp, cp, ep = config.tensor_model_parallel_size, config.context_parallel_size, config.expert_model_parallel_size
    pieces = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    etp = config.expert_tensor_parallel_size or tp
    rules = [
        ("tensor_model_parallel_size", tp, "num_key_value_heads", hf.num_key_value_heads),
        ("tensor_model_parallel_size x context_parallel_size", tp * cp, "num_attention_heads", hf.num_attention_heads),
        ("pipeline_model_parallel_size x virtual_pipeline_model_parallel_size", pieces, "num_hidden_layers",
         hf.num_hidden_layers),
    ]
    if family.experts:
        rules += [("expert_model_parallel_size", ep, "num_experts", hf.num_experts),
                  ("expert_tensor_parallel_size", etp, "moe_intermediate_size", hf.moe_intermediate_size)]
        if tp > 1 and not config.sequence_parallel:
            raise ValueError("megatron.tensor_model_parallel_size > 1 needs megatron.sequence_parallel in a model with experts")
    else:
        rules.append(("tensor_model_parallel_size", tp, "intermediate_size", hf.intermediate_size))
        if ep > 1 or config.expert_tensor_parallel_size is not None:
            raise ValueError(f"megatron.expert_model_parallel_size and expert_tensor_parallel_size are for models with experts, "
                             f"which a {hf.model_type} model has not")
    for key, size, name, number in rules:
        if number % size:
            raise ValueError(f"megatron.{key} = {size} must divide the model's {name} = {number}")


@cache
def check_folder(path: str, sizes: tuple[tuple[str, int | bool | None], ...]) -> None:
    """`check_sizes` of the model in a folder; `sizes` are the keys of MegatronConfig that matter."""
    from rlrun.models.folder import load_config

    check_sizes(load_config(path), MegatronConfig(**dict(sizes)))  # type: ignore[arg-type]
