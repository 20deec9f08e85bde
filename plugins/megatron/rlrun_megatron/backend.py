"""The driver's view of the Megatron backend. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlrun.workers.protocol import Layout
from rlrun_megatron.families import check_folder
from rlrun_megatron.plugin import MegatronConfig

if TYPE_CHECKING:
    from rlrun.config.schema import Config

SIZES = ("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
         "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
         "expert_tensor_parallel_size")
"""The keys that a model must fit."""
BYTES = {"bfloat16": 2, "float32": 4}


class Megatron:
    """Ranks in Megatron's order: tensor-parallel neighbours, then context-parallel, data-parallel and pipeline ranks."""

    @staticmethod
    def layout(config: Config, ranks: int, sp: int) -> Layout:
        """Data-parallel replicas of as many ranks as share one model. Raises ValueError where sizes do not fit."""
        section = config.section("megatron", MegatronConfig)
        if sp > 1:
            raise ValueError("sequence parallelism by another plugin works on transformers' models, and the megatron backend has "
                             "its own: take that plugin from the list")
        if config.model.dtype not in BYTES:
            raise ValueError(f"model.dtype {config.model.dtype} is not supported by the megatron backend: take "
                             f"{' or '.join(BYTES)}")
        tp, cp, pp = section.tensor_model_parallel_size, section.context_parallel_size, section.pipeline_model_parallel_size
        if section.sequence_parallel and tp == 1:
            raise ValueError("megatron.sequence_parallel needs megatron.tensor_model_parallel_size > 1")
        if section.virtual_pipeline_model_parallel_size and pp == 1:
            raise ValueError("megatron.virtual_pipeline_model_parallel_size needs megatron.pipeline_model_parallel_size > 1")
        if section.use_dist_checkpointing != bool(section.dist_checkpointing_path):
            raise ValueError("megatron.use_dist_checkpointing and megatron.dist_checkpointing_path must both be given or neither")
        size = tp * cp * pp
        if ranks % size:
            raise ValueError(f"a model's {size} ranks (megatron.tensor_ x context_ x pipeline_model_parallel_size) do not divide "
                             f"the {ranks} training ranks: make resources.train_ranks a multiple of them")
        experts = section.expert_model_parallel_size * (section.expert_tensor_parallel_size or tp)
        if ranks // pp % experts:
            raise ValueError(f"experts over {experts} ranks (megatron.expert_model_ x expert_tensor_parallel_size) do not divide "
                             f"the {ranks // pp} ranks of a pipeline stage: make resources.train_ranks a multiple of them")
        sizes = tuple((key, getattr(section, key)) for key in SIZES)
        for path in dict.fromkeys((config.model.path, config.ref.path, config.critic.path)):
            if path is not None:
                check_folder(path, sizes)
        dp = ranks // size
        return Layout(dp, tuple(rank // (tp * cp) % dp for rank in range(ranks)), tuple(range(0, dp * tp * cp, tp * cp)))

    @staticmethod
    def memory_bytes(config: Config, parameters: int, layout: Layout, trainable: bool) -> int:
        """One rank's parameters, and where it trains gradients in float32 and optimizer state (AdamW: two moments)."""
        section = config.section("megatron", MegatronConfig)
        held = -(-parameters // (section.tensor_model_parallel_size * section.pipeline_model_parallel_size))
        width = BYTES[config.model.dtype]
        if not trainable:
            return held * width
        state = 4 * (2 if config.actor.optim.name == "adamw" else 0) + (4 if width < 4 else 0)
        replicas = layout.dp * section.context_parallel_size if section.use_distributed_optimizer else 1
        return held * (width + 4) + held * state // replicas
