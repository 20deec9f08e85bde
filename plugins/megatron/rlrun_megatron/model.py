"""Megatron's GPT model of a Hugging Face configuration, with the outputs of rlrun's PolicyModel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from rlrun.models.log_probs import chosen_log_probs
from rlrun.models.policy import OUTPUTS
from rlrun_megatron.layers import RMSNorm, Row, layer_spec
from rlrun_megatron.plugin import MegatronConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Head = Literal["lm", "value", "score"]


@dataclass(frozen=True)
class Family:
    """What sets one family of models apart from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {"llama": Family(), "mistral": Family(), "qwen2": Family(qkv_bias=True), "qwen3": Family(qk_norm=True)}
"""By `model_type`."""
_ROPES = ("default", "linear", "llama3")


def family_of(hf: PretrainedConfig) -> Family:
    """Raises ValueError for models that this backend cannot build."""
    if hf.model_type not in FAMILIES:
        raise ValueError(f"the megatron backend has no {hf.model_type!r} models; it has {', '.join(FAMILIES)}: take another "
                         "backend")
    refused = {
        f"hidden_act {hf.hidden_act!r}": hf.hidden_act != "silu",
        "attention_bias": getattr(hf, "attention_bias", False),
        "mlp_bias": getattr(hf, "mlp_bias", False),
        f"rope_type {hf.rope_parameters['rope_type']!r}": hf.rope_parameters["rope_type"] not in _ROPES,
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"the megatron backend does not support {what} of a {hf.model_type} model: take another backend")
    return FAMILIES[hf.model_type]


def head_size(hf: PretrainedConfig) -> int:
    size: int = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return size


def transformer_config(hf: PretrainedConfig, config: MegatronConfig, dtype: torch.dtype, recompute: bool,
                       fused: bool) -> TransformerConfig:
    """Megatron's configuration of a model. Raises ValueError where sizes do not fit or an override is wrong."""
    family, tp = family_of(hf), config.tensor_model_parallel_size
    for name in ("num_key_value_heads", "intermediate_size"):
        if getattr(hf, name) % tp:
            raise ValueError(f"megatron.tensor_model_parallel_size = {tp} must divide the model's {name} = {getattr(hf, name)}")
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers, "hidden_size": hf.hidden_size, "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads, "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_size(hf), "normalization": "RMSNorm", "layernorm_epsilon": hf.rms_norm_eps,
        "add_bias_linear": False, "add_qkv_bias": family.qkv_bias, "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True, "activation_func": F.silu, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "params_dtype": dtype, "bf16": dtype == torch.bfloat16, "pipeline_dtype": dtype,
        "tensor_model_parallel_size": tp, "variable_seq_lengths": True, "perform_initialization": False,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
        "bias_activation_fusion": fused, "bias_dropout_fusion": fused,
    }
    if recompute:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    key = "megatron.override_transformer_config"
    return made(TransformerConfig, fields, config.override_transformer_config, key)


def made(kind: type[Any], fields: dict[str, Any], override: dict[str, Any], key: str) -> Any:
    """A dataclass of Megatron's, of our fields and the user's. Raises ValueError for what it does not take."""
    if ours := sorted(set(override) & set(fields)):
        raise ValueError(f"{key}: {', '.join(ours)} follow from the model and the other keys, and cannot be overridden")
    try:
        return kind(**fields, **override)
    except (TypeError, ValueError, AssertionError) as error:
        if not override:
            raise
        raise ValueError(f"{key}: {error}") from error


def padded_vocabulary(hf: PretrainedConfig, tp: int) -> int:
    """Rows of the embedding over `tp` ranks of equal share."""
    return -(-int(hf.vocab_size) // tp) * tp


class Stage(GPTModel):
    """A pipeline stage: hidden states out, or of the last one the outputs of the model's head."""

    def __init__(self, hf: PretrainedConfig, config: TransformerConfig, head: Head, master: torch.dtype) -> None:
        tp = parallel_state.get_tensor_model_parallel_group()
        layers = [layer_spec(config)] * get_num_layers_to_build(config)
        super().__init__(
            config, TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
            padded_vocabulary(hf, tp.size()), hf.max_position_embeddings,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and head == "lm", position_embedding_type="none")
        self.head = head
        self.vocabulary: int = hf.vocab_size
        device = torch.cuda.current_device()
        self.register_buffer("inv_freq", _inv_freq(hf).to(device), persistent=False)
        if head != "lm" and self.post_process:  # the same on all tensor-parallel ranks, and never below float32
            self.output_layer = nn.Linear(hf.hidden_size, 1, bias=head == "value", dtype=master, device=device)
        for layer in self.decoder.layers:
            layer.self_attention.core_attention.window = _window(hf, layer.layer_number - 1)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, packed_seq_params: Row, **_: Any) -> tuple[Any, ...]:
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        angles = packed_seq_params.position_ids[:, None].float() * self.inv_freq
        return hidden, torch.cat([angles, angles], -1)[:, None, None], None, None, None, None

    def _postprocess(self, hidden_states: Tensor, packed_seq_params: Row, **_: Any) -> Tensor | dict[str, Tensor]:
        row = packed_seq_params
        if not self.post_process:
            return hidden_states
        hidden = hidden_states
        if self.head == "lm":
            hidden = copy_to_tensor_model_parallel_region(hidden)
        outputs = {}
        for name, values in self._outputs(hidden[:, 0].index_select(0, row.chosen), row).items():
            column = values.new_zeros(row.ids.shape[0]).index_put((row.chosen,), values)
            outputs[name] = column.roll(1)[:row.total]
        return outputs

    def _outputs(self, hidden: Tensor, row: Row) -> dict[str, Tensor]:
        if not row.want <= OUTPUTS[self.head]:
            raise ValueError(f"head {self.head!r} computes {sorted(OUTPUTS[self.head])}; asked for: {sorted(row.want)}")
        if self.head != "lm":
            return {"values": self.output_layer(hidden.to(self.output_layer.weight.dtype))[:, 0]}
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        tp = parallel_state.get_tensor_model_parallel_group()
        first = tp.rank() * weight.shape[0]
        log_probs, entropy = chosen_log_probs(
            hidden, weight[:self.vocabulary - first], None, row.targets, row.temperature, entropy="entropy" in row.want,
            compiled=hidden.is_cuda, group=tp if tp.size() > 1 else None, first=first)
        outputs = {"log_probs": log_probs, "entropy": entropy}
        return {name: x for name, x in outputs.items() if name in row.want and x is not None}


def _inv_freq(hf: PretrainedConfig) -> Tensor:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(hf)
    assert rotary.attention_scaling == 1.0
    frequencies: Tensor = rotary.inv_freq
    return frequencies


def _window(hf: PretrainedConfig, layer: int) -> int | None:
    window: int | None = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else None


@torch.no_grad()
def init_value_head(stage: Stage, seed: int) -> None:
    """Fresh, small weights, the same as those of rlrun's PolicyModel: values start near 0."""
    layer = stage.output_layer
    drawn = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    layer.weight.copy_(drawn / (layer.in_features + 1))
    layer.bias.zero_()
