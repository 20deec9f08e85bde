"""Megatron's GPT model of a Hugging Face configuration, with the outputs of rlrun's PolicyModel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from rlrun.models.log_probs import chosen_log_probs
from rlrun.models.policy import OUTPUTS
from rlrun_megatron.backend import SIZES
from rlrun_megatron.context import whole_row
from rlrun_megatron.families import check_sizes, family_of, head_size
from rlrun_megatron.layers import RMSNorm, Row, layer_spec
from rlrun_megatron.plugin import MegatronConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Head = Literal["lm", "value", "score"]


def transformer_config(hf: PretrainedConfig, config: MegatronConfig, dtype: torch.dtype, recompute: bool,
                       fused: bool) -> TransformerConfig:
    """Megatron's configuration of a model. Raises ValueError where sizes do not fit or an override is wrong."""
    check_sizes(hf, config)
    key, override = "megatron.override_transformer_config", config.override_transformer_config
    if "layernorm" in override.get("recompute_modules", ()) and not HAVE_TE:
        raise ValueError(f"{key}: recompute_modules layernorm needs TransformerEngine, which is not installed")
    layers = {"transformer_impl": config.transformer_impl, "masked_softmax_fusion": False,
              "gradient_accumulation_fusion": config.transformer_impl == "transformer_engine",
              "bias_activation_fusion": fused, "bias_dropout_fusion": fused}
    return made(TransformerConfig, architecture(hf) | layers | running(config, dtype, recompute, fused), override, key)


def architecture(hf: PretrainedConfig) -> dict[str, Any]:
    """What a model's Hugging Face configuration says, in Megatron's terms."""
    family = family_of(hf)
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers, "hidden_size": hf.hidden_size, "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads, "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_size(hf), "normalization": "RMSNorm", "layernorm_epsilon": hf.rms_norm_eps,
        "add_bias_linear": False, "add_qkv_bias": family.qkv_bias, "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True, "activation_func": F.silu, "perform_initialization": False,
    }
    if family.experts:
        fields |= {
            "num_moe_experts": hf.num_experts, "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok, "moe_router_pre_softmax": not hf.norm_topk_prob,
        }
    return fields


def running(config: MegatronConfig, dtype: torch.dtype, recompute: bool, fused: bool) -> dict[str, Any]:
    """How any model is cut and computed."""
    turns = config.virtual_pipeline_model_parallel_size is not None
    fields: dict[str, Any] = {
        "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "params_dtype": dtype, "bf16": dtype == torch.bfloat16, "pipeline_dtype": dtype,
        **{key: getattr(config, key) for key in SIZES},
        # Two stages that take turns are one another's neighbours on both sides: what they exchange must be of one shape, and
        # not in one batch.
        "variable_seq_lengths": not turns, "overlap_p2p_comm": turns, "batch_p2p_comm": not turns,
        "deallocate_pipeline_outputs": fused or not turns,  # gloo still reads what NCCL has in its queue
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        "calculate_per_token_loss": True,
    }
    if recompute:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return fields


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

    head: Head
    vocabulary: int
    scale, softcap = 1.0, None

    def __init__(self, hf: PretrainedConfig, config: TransformerConfig, head: Head, master: torch.dtype,
                 vp_stage: int | None = None) -> None:
        tp = parallel_state.get_tensor_model_parallel_group()
        layers = [layer_spec(config)] * get_num_layers_to_build(config, vp_stage)
        super().__init__(
            config, TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
            padded_vocabulary(hf, tp.size()), hf.max_position_embeddings,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and head == "lm", position_embedding_type="none",
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage), vp_stage=vp_stage)
        self.head = head
        self.vocabulary = hf.vocab_size
        device = torch.cuda.current_device()
        self.register_buffer("inv_freq", _inv_freq(hf).to(device), persistent=False)
        if head != "lm" and self.post_process:  # the same on all tensor-parallel ranks, and never below float32
            self.output_layer = nn.Linear(hf.hidden_size, 1, bias=head == "value", dtype=master, device=device)
        for layer in self.decoder.layers:
            layer.self_attention.core_attention.window = _window(hf, layer.layer_number - 1)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, packed_seq_params: Row, **_: Any) -> tuple[Any, ...]:
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        return hidden, None, None, None, None, None

    def angles(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles at positions [T]: twice [T, 1, D]."""
        angles = (position_ids[:, None].float() * self.inv_freq).repeat(1, 2)[:, None]
        return angles.cos().to(self.config.params_dtype), angles.sin().to(self.config.params_dtype)

    def _postprocess(self, hidden_states: Tensor, packed_seq_params: Row, **_: Any) -> Tensor | dict[str, Tensor]:
        row = packed_seq_params
        if not self.post_process:
            return hidden_states
        # Each rank's part of the vocabulary has its part of the gradient; a scalar head has the whole on every rank.
        hidden, parts = hidden_states, self.head == "lm"
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=parts)
        elif parts:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        outputs = {}
        for name, values in self._outputs(hidden[:, 0].index_select(0, row.chosen), row).items():
            column = values.new_zeros(row.ids.shape[0]).index_put((row.chosen,), values)
            outputs[name] = whole_row(column).roll(1)[:row.total]
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
            hidden, weight[:self.vocabulary - first], None, row.targets, row.temperature, self.scale, self.softcap,
            entropy="entropy" in row.want, compiled=hidden.is_cuda, group=tp if tp.size() > 1 else None, first=first)
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
