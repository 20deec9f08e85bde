from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.batch import Batch
from rlrun.config.schema import ActorConfig, Config, ModelConfig, OptimConfig
from rlrun.plugins import Plugins
from rlrun.testing import plain, updates
from rlrun.testing.ranks import RankPool, ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import TokenLoss, Update, random_batch, update
from rlrun.workers.protocol import RoleRequest, RoleSpec
from rlrun_megatron.plugin import MegatronConfig

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
KINDS = {
    "llama": ("llama", {}), "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama3 rope": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}),
    "qwen2": ("qwen2", {}), "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}), "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "deep": ("llama", {"num_hidden_layers": 4}), "deep tied": ("qwen2", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "odd": ("llama", {"words": ["odd"]}), "odd tied": ("qwen3", {"words": ["odd"], "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 4}),
}


def make_config(path: str | Path, backend: str = "megatron", micro: int = 4096, **megatron: Any) -> Config:
    """A config of tiny runs in float32: SGD at rate 1, so that weights move by the gradient."""
    optim = OptimConfig(name="sgd", lr=1.0, clip_grad=0.0)
    config = Config(plugins=[plain.__file__ if backend == "plain" else backend],
                    model=ModelConfig(path=str(path), dtype="float32"),
                    actor=ActorConfig(backend=backend, optim=optim, tokens_per_micro_batch=micro))
    config.megatron = MegatronConfig(**megatron)
    return config


def make_batch(*lengths: int, prompt: int = 2, seed: int = 0) -> Batch:
    return random_batch(lengths, prompt, seed)


def assert_same(got: Update, expected: Update, tolerance: float = 1e-5) -> None:
    updates.assert_same(got, expected, tolerance)


def make_worker(config: Config, trainable: bool = True, head: str = "lm", total_updates: int = 10) -> Any:
    """A worker beside those of the other ranks, of model.path."""
    import torch.distributed as dist

    plugins = Plugins.load(config.plugins)
    config.resources.train_ranks = dist.get_world_size()
    request = RoleRequest(trainable, config.model.path, config.model.dtype, head)  # type: ignore[arg-type]
    spec = RoleSpec("actor", config.actor.backend, request, config, plugins, dist.get_rank(), torch.device("cpu"), total_updates,
                    frozenset({"log_probs", "entropy"} if head == "lm" else {"values"}))
    return plugins.make_worker(spec=spec, layout=plugins.layout(config))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, sizes) in KINDS.items():
        save_tiny(folder / name, kind, **{**SIZES, **sizes})
    return {name: folder / name for name in KINDS}


@pytest.fixture(scope="session")
def ranks4() -> RankPool:
    return RankPool(4)


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions above, for tests (which cannot import a conftest)."""
    import types

    return types.SimpleNamespace(
        make_config=make_config, make_batch=make_batch, update=update, assert_same=assert_same, KINDS=KINDS, SIZES=SIZES,
        TokenLoss=TokenLoss, make_worker=make_worker)
