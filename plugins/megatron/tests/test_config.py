"""Sizes that do not fit are refused on the driver, before any process exists."""

from __future__ import annotations

import re

import pytest

from rlrun.plugins import Plugins

CASES = [
    ("llama", 3, {"tensor_model_parallel_size": 2}, "a model's 2 ranks"),
    ("llama", 4, {"tensor_model_parallel_size": 4}, "size = 4 must divide the model's num_key_value_heads = 2"),
    ("llama", 2, {"sequence_parallel": True}, "sequence_parallel needs megatron.tensor_model_parallel_size > 1"),
    ("llama", 2, {"virtual_pipeline_model_parallel_size": 2}, "needs megatron.pipeline_model_parallel_size > 1"),
    ("llama", 2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, "num_hidden_layers = 2"),
    ("llama", 8, {"context_parallel_size": 8}, "num_attention_heads = 4"),
    ("llama", 2, {"expert_model_parallel_size": 2}, "are for models with experts"),
    ("moe", 2, {"expert_model_parallel_size": 4}, "experts over 4 ranks"),
    ("moe", 8, {"expert_model_parallel_size": 8}, "num_experts = 4"),
    ("moe", 2, {"tensor_model_parallel_size": 2}, "needs megatron.sequence_parallel in a model with experts"),
    ("llama", 1, {"use_dist_checkpointing": True}, "must both be given or neither"),
]


@pytest.mark.parametrize("kind, ranks, sizes, message", CASES, ids=lambda x: str(x)[:20])
def test_refused(models, tools, kind, ranks, sizes, message):
    config = tools.make_config(models[kind], **sizes)
    config.resources.train_ranks = ranks
    with pytest.raises(ValueError, match=re.escape(message)):
        Plugins.load(["megatron"]).layout(config)


def test_layout(models, tools):
    """Case 73: batches are cut by data-parallel shards, not by ranks; neighbours share a tensor, halves are stages."""
    config = tools.make_config(models["llama"], tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    config.resources.train_ranks = 8
    layout = Plugins.load(["megatron"]).layout(config)
    assert layout.dp == 2
    assert layout.dp_index == (0, 0, 1, 1, 0, 0, 1, 1)
    assert layout.result_ranks == (0, 2)


def test_other_models_and_plugins(tools, tmp_path, models):
    """What the backend cannot build, another plugin's sequence parallelism, and float64 are refused by name."""
    from rlrun.testing.tiny import save_tiny

    save_tiny(tmp_path, "gpt2", hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    plugins = Plugins.load(["megatron"])
    with pytest.raises(ValueError, match=r"no 'gpt2' models; it has llama, mistral"):
        plugins.layout(tools.make_config(tmp_path))
    backend = plugins.resolve("backend", "megatron")
    with pytest.raises(ValueError, match="take that plugin from the list"):
        backend.layout(tools.make_config(models["llama"]), 2, 2)
    config = tools.make_config(models["llama"])
    config.model.dtype = "float64"
    with pytest.raises(ValueError, match=r"model\.dtype float64"):
        plugins.layout(config)


def test_overrides(models, ranks1, tools):
    """Unknown fields, and those that the model or other keys decide, are refused; others reach Megatron."""
    config = tools.make_config(models["llama"], override_transformer_config={"no_such_field": 1})
    with pytest.raises(ValueError, match="megatron.override_transformer_config: .*no_such_field"):
        tools.update(ranks1, config, tools.make_batch(5))
    config = tools.make_config(models["llama"], override_transformer_config={
        "recompute_granularity": "selective", "recompute_modules": ["layernorm"]})
    with pytest.raises(ValueError, match="recompute_modules layernorm needs TransformerEngine"):
        tools.update(ranks1, config, tools.make_batch(5))
    config = tools.make_config(models["llama"], transformer_impl="transformer_engine")
    with pytest.raises(ValueError, match="transformer_engine needs TransformerEngine: pip install"):
        tools.update(ranks1, config, tools.make_batch(5))
    config = tools.make_config(models["llama"], override_ddp_config={"use_distributed_optimizer": True})
    with pytest.raises(ValueError, match="use_distributed_optimizer follow from the model and the other keys"):
        tools.update(ranks1, config, tools.make_batch(5))


@pytest.mark.parametrize("kind", ["qwen2", "moe"])
def test_fields_of_a_gpu(models, ranks1, tools, kind):
    """Megatron takes the fused parts that are for GPUs alone."""
    def run():
        import torch

        from rlrun.models.loading import load_config
        from rlrun_megatron.model import transformer_config
        from rlrun_megatron.plugin import MegatronConfig

        config = MegatronConfig(override_transformer_config={"recompute_granularity": "selective"})
        made = transformer_config(load_config(str(models[kind])), config, torch.bfloat16, False, True)
        return made.bias_dropout_fusion, made.recompute_granularity, made.attention_dropout

    assert ranks1.run(run) == [(True, "selective", 0.0)]
