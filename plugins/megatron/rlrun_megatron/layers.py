"""Parts of Megatron's layers that work on packed rows without TransformerEngine: attention and norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn

from rlrun.models.attention import Packed, attend
from rlrun_megatron.context import to_heads, to_tokens

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # which routers look for, also where TransformerEngine is not installed


@dataclass(frozen=True)
class Row:
    """A rank's part of a packed row, on the device, and what is to be computed of it. It travels to every layer in the place
    of Megatron's own `packed_seq_params`."""

    ids: Tensor
    position_ids: Tensor
    chosen: Tensor
    """Where there is something to predict: indices into `ids`."""
    targets: Tensor
    """The tokens that follow there."""
    cos: Tensor
    """[T, 1, D], like `sin`: of each token's rotary angles."""
    sin: Tensor
    packed: Packed
    total: int
    """Tokens of the whole row, without what fills it up."""
    want: frozenset[str]
    temperature: float
    qkv_format: ClassVar[str] = "sbhd"
    """For Megatron, a row is one long sequence, whose boundaries only `PackedAttention` knows."""


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embeddings (arXiv:2104.09864) of [T, H, D] and [T, H_kv, D]."""
    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return one(query), one(key)


rotate_fused = torch.compile(rotate)
"""Sizes of heads stay constants: where they are variables, this takes many times as long."""


class PackedAttention(MegatronModule):
    """Causal attention within the sequences of a row, with rotary embeddings."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.window: int | None = None
        """Tokens that a token sees, itself included; set by the model."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Row,
                **_: Any) -> Tensor:
        """[T, 1, H, D] and twice [T, 1, H_kv, D] -> [T, 1, H * D]. Megatron would turn queries and keys in many small steps."""
        row, spread = packed_seq_params, self.config.context_parallel_size > 1
        q, k = (rotate_fused if query.is_cuda else rotate)(query[:, 0], key[:, 0], row.cos, row.sin)
        parts = q, k, value[:, 0]
        output = attend(*(to_heads(*parts) if spread else parts), row.packed, self.scale, self.window)
        return (to_tokens(output) if spread else output).flatten(1)[:, None]


class RMSNorm(nn.Module):
    """Root-mean-square norm. Under sequence parallelism each rank sees its part of the tokens, so gradients must be added
    over ranks, which Megatron does where the parameter is marked."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def engine_parts() -> BackendSpecProvider:
    """TransformerEngine's layers, without the norms that it puts into them: parameters have the same names in either case.
    Raises ValueError where it is not installed."""
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        raise ValueError("megatron.transformer_impl transformer_engine needs TransformerEngine: pip install "
                         "'transformer-engine[pytorch]', or take local")
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class Parts(TESpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return False

    return Parts()


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """A pre-norm decoder layer, dense or with experts; config.transformer_impl says whose linear layers it has."""
    parts = engine_parts() if config.transformer_impl == "transformer_engine" else LocalSpecProvider()
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=parts.column_parallel_linear(), core_attention=PackedAttention, linear_proj=parts.row_parallel_linear(),
        q_layernorm=qk_norm, k_layernorm=qk_norm)
    # Checkpoints have the names of TransformerEngine's layers, like those of Megatron-LM.
    renamed = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if config.num_moe_experts is None:
        renamed["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=get_mlp_module_spec_for_backend(backend=parts, num_experts=config.num_moe_experts, moe_grouped_gemm=False),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=renamed,
    ))
