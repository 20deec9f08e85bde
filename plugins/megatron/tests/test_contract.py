"""The suites that every plugin and backend passes, in float32, over two pipeline stages and others."""

from __future__ import annotations

from rlrun.testing.contracts.backend import BackendContract
from rlrun.testing.contracts.base import PluginContract


class TestPlugin(PluginContract):
    plugins = ["megatron"]


class TestMegatron(BackendContract):
    plugins = ["megatron"]
    backend = "megatron"
    architecture = "llama"
    sizes = {**BackendContract.sizes, "num_key_value_heads": 2}
    dtype = "float32"
    layouts = {
        "stages": {"megatron": {"pipeline_model_parallel_size": 2}},
        "tensors": {"megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    }
