"""The suites that every plugin and backend passes, in float64, also with each option that must change no number."""

from __future__ import annotations

from rlrun.testing.contracts.backend import BackendContract
from rlrun.testing.contracts.base import PluginContract


class TestPlugin(PluginContract):
    plugins = ["fsdp"]


class TestFsdp(BackendContract):
    plugins = ["fsdp"]
    backend = "fsdp"
    layouts = {
        "sharded": {}, "gathered": {"fsdp": {"reshard_after_forward": False}}, "replicated": {"fsdp": {"shard_size": 1}},
        "one unit": {"fsdp": {"wrap_policy": {"min_num_params": 10**9}}},
        "small units": {"fsdp": {"wrap_policy": {"layer_classes": ["GPT2MLP", "GPT2Attention"]}}},
        "host": {"fsdp": {"cpu_offload": True}}, "recomputed": {"model": {"gradient_checkpointing": True}},
    }
