"""The driver's view of the Megatron backend. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlrun.workers.protocol import Layout
from rlrun_megatron.plugin import MegatronConfig

if TYPE_CHECKING:
    from rlrun.config.schema import Config

BYTES = {"bfloat16": 2, "float32": 4}


class Megatron:
    """Ranks in Megatron's order: tensor-parallel neighbours, then data-parallel replicas."""

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
        size = section.tensor_model_parallel_size
        if ranks % size:
            raise ValueError(f"megatron.tensor_model_parallel_size = {size} does not divide the {ranks} training ranks: "
                             "make resources.train_ranks a multiple of it")
        return Layout(ranks // size, tuple(rank // size for rank in range(ranks)), tuple(range(0, ranks, size)))

    @staticmethod
    def memory_bytes(config: Config, parameters: int, layout: Layout, trainable: bool) -> int:
        """One rank's parameters, and where it trains gradients in float32 and optimizer state (AdamW: two moments)."""
        section = config.section("megatron", MegatronConfig)
        held = -(-parameters // section.tensor_model_parallel_size)
        width = BYTES[config.model.dtype]
        if not trainable:
            return held * width
        state = 4 * (2 if config.actor.optim.name == "adamw" else 0) + (4 if width < 4 else 0)
        return held * (width + 4) + held * state // (layout.dp if section.use_distributed_optimizer else 1)
