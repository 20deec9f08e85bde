"""The driver's view of the FSDP2 backend. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlrun.workers.protocol import Layout
from rlrun_fsdp.plugin import FsdpConfig

if TYPE_CHECKING:
    from rlrun.config.schema import Config

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class Fsdp:
    """Every rank holds an equal share of each parameter; ranks of one shard of data are neighbours."""

    @staticmethod
    def layout(config: Config, ranks: int, sp: int) -> Layout:
        """`ranks` / `sp` data-parallel shards. Raises ValueError where `sp` does not divide `ranks`."""
        if ranks % sp:
            raise ValueError(f"{ranks} training ranks cannot be split into sequence-parallel groups of {sp}: "
                             "make resources.train_ranks a multiple of the sequence-parallel size")
        shards = config.section("fsdp", FsdpConfig).shard_size or ranks
        if ranks % shards:
            raise ValueError(f"fsdp.shard_size = {shards} does not divide the {ranks} training ranks: "
                             "make resources.train_ranks a multiple of it")
        return Layout(ranks // sp, tuple(rank // sp for rank in range(ranks)), tuple(range(0, ranks, sp)))

    @staticmethod
    def memory_bytes(config: Config, parameters: int, layout: Layout, trainable: bool) -> int:
        """One rank's parameters, and where it trains gradients and optimizer state (AdamW: two moments)."""
        section = config.section("fsdp", FsdpConfig)
        if section.cpu_offload:
            return 0
        width = BYTES[config.model.dtype]
        if trainable:
            width = max(width, 4) * (4 if config.actor.optim.name == "adamw" else 2)
        return -(-parameters * width // (section.shard_size or layout.ranks))
