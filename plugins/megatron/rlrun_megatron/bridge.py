"""Models that are none of ours: built and converted by NVIDIA's Megatron-Bridge, where it is installed.

Its layers are those of TransformerEngine, which take packed rows by their own names and turn queries and keys themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlrun.models.policy import logit_transform
from rlrun_megatron.families import check_sizes
from rlrun_megatron.layers import Row
from rlrun_megatron.model import Head, Stage, running
from rlrun_megatron.plugin import MegatronConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class EngineRow(Row):
    """A row in the words of Megatron's PackedSeqParams."""

    qkv_format = "thd"
    cu_seqlens_q_padded = cu_seqlens_kv_padded = cp_group = local_cp_size = None

    @property
    def cu_seqlens_q(self) -> Tensor:
        return self.packed.cu_seqlens

    @property
    def max_seqlen_q(self) -> int:
        return self.packed.max_length

    cu_seqlens_kv, max_seqlen_kv = cu_seqlens_q, max_seqlen_q


class Bridged:
    """A model of Megatron-Bridge's, on this rank. Raises ValueError for what it or this backend does not do with it."""

    def __init__(self, path: str, hf: PretrainedConfig, head: Head, config: MegatronConfig, dtype: torch.dtype, recompute: bool,
                 fused: bool) -> None:
        from megatron.bridge import AutoBridge

        check_sizes(hf, config)
        if head != "lm":
            raise ValueError(f"megatron has {hf.model_type} models as language models alone, without a head of values")
        self.bridge, self.dtype = AutoBridge.from_hf_pretrained(path), dtype
        self.transformer = self.bridge.to_megatron_provider(load_weights=False)
        for name, value in (running(config, dtype, recompute, fused) | config.override_transformer_config).items():
            if not hasattr(self.transformer, name):
                raise ValueError(f"megatron.override_transformer_config: {name} is no field of {type(self.transformer).__name__}")
            setattr(self.transformer, name, value)
        self.transformer.finalize()
        assert isinstance(self.transformer, TransformerConfig)
        pieces = config.virtual_pipeline_model_parallel_size
        self.stages = [self._stage(hf, number) for number in (range(pieces) if pieces else [None])]
        self.bridge.load_hf_weights(self.stages)

    def _stage(self, hf: PretrainedConfig, number: int | None) -> Stage:
        ends = {"ignore_virtual": False, "vp_stage": number}
        stage: Any = self.transformer.provide(parallel_state.is_pipeline_first_stage(**ends),
                                              parallel_state.is_pipeline_last_stage(**ends), number)
        own = {name: vars(Stage)[name] for name in ("_postprocess", "_outputs")} | {"angles": lambda self, ids: (ids, ids)}
        stage.__class__ = type("BridgedStage", (type(stage),), own)
        stage.head, stage.vocabulary = "lm", hf.vocab_size
        stage.scale, stage.softcap = logit_transform(hf)
        return stage

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face's names, on every rank; collective."""
        for name, tensor in self.bridge.export_hf_weights(self.stages, show_progress=False):
            yield name, tensor.to(self.dtype)
