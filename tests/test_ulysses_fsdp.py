"""Sequences over ranks under FSDP, with all of its options: the numbers of one rank."""

from __future__ import annotations

import pytest
import torch

from rlrun.config.schema import ActorConfig, Config, ModelConfig, OptimConfig
from rlrun.plugins import Plugins
from rlrun.testing.contracts.attention import AttentionContract
from rlrun.testing.contracts.base import configure
from rlrun.testing.images import image_batch, save_tiny_vlm
from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import assert_same, random_batch, update

LENGTHS = (5, 9, 3, 7, 6, 9, 2)


@pytest.mark.slow
class TestUlyssesWithFsdp(AttentionContract):
    """Cases 55, 56, 57, 62, with FSDP's collectives between those of the plugin."""

    plugins = ["fsdp", "ulysses"]
    backend = "fsdp"
    spread = {"ulysses": {"size": 2}}
    apart = {"ulysses": {"size": 1}}


def both(one, two, path, batch, dtype="float64", fsdp=None, model=None, head="lm"):
    """The same update over one rank and over two that share each sequence."""
    configs = []
    for size in (1, 2):
        config = Config(model=ModelConfig(path=str(path), dtype=dtype), actor=ActorConfig(
            optim=OptimConfig(name="sgd", lr=1.0, clip_grad=0.0), tokens_per_micro_batch=4096 if size == 1 else 18))
        sections = {"ulysses": {"size": size}, "fsdp": fsdp or {}, "model": model or {}}
        configs.append(configure(config, Plugins.load(["fsdp", "ulysses"]), sections))
    return update(two, configs[1], batch, head), update(one, configs[0], batch, head)


@pytest.mark.parametrize("options", [
    {}, {"fsdp": {"reshard_after_forward": False}}, {"fsdp": {"shard_size": 1}}, {"fsdp": {"cpu_offload": True}},
    {"model": {"gradient_checkpointing": True}}, {"head": "value"},
    *(pytest.param({"fsdp": {"compile": True}, **more}, marks=pytest.mark.slow)
      for more in ({}, {"model": {"gradient_checkpointing": True}})),
], ids=str)
def test_update(ranks1, ranks2, tmp_path, options):  # noqa: F811
    """Cases 55, 60: one update of every parameter, in micro-batches; where layers are compiled, exchanges have one order too."""
    save_tiny(tmp_path, "gpt2", hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    got, expected = both(ranks1, ranks2, tmp_path, random_batch(LENGTHS, 1, dtype=torch.float64), **options)
    assert expected.metrics["grad_norm"] > 0.1
    assert_same(got, expected, 1e-8 if "compile" in str(options) else 1e-9)


def test_adapters(ranks1, ranks2, tmp_path):  # noqa: F811
    """Low-rank adapters of attention and MLP learn equally."""
    save_tiny(tmp_path, "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    got, expected = both(ranks1, ranks2, tmp_path, random_batch((5, 9, 3, 7), 1), "float32", {"lora": {"rank": 2}})
    assert_same(got, expected, 1e-4, columns=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=str)
def test_images(ranks1, ranks2, tmp_path, options):  # noqa: F811
    """An image across the cut; decoder layers are compiled, a vision tower's blocks are not."""
    save_tiny_vlm(tmp_path, "qwen2_5_vl")
    batch = image_batch([3, (1, 4, 4), 4, (1, 2, 6), 3], [7], [1, (1, 6, 4), 5], [3, (1, 4, 6), 2], [2])
    noise = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(1))
    batch.tokens |= {"log_probs": noise[0] - 5.5, "advantages": noise[1]}
    got, expected = both(ranks1, ranks2, tmp_path, batch, "float32", options)
    assert float(expected.gradients["visual.patch_embed.proj.weight"].norm()) > 0
    assert_same(got, expected, 2e-5, columns=1e-5)
