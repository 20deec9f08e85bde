from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlrun.batch import Batch, shard
from rlrun.config.schema import ActorConfig, Config, ModelConfig, OptimConfig
from rlrun.plugins import Plugins
from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import TokenLoss, random_batch
from rlrun.workers.protocol import RoleRequest, RoleSpec
from rlrun_fsdp.backend import Fsdp
from rlrun_fsdp.plugin import FsdpConfig, WrapPolicy
from rlrun_fsdp.worker import FsdpWorker

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def make_config(path: str | Path, **changes: Any) -> Config:
    """A config of tiny runs: float64, and an SGD rate at which one update moves weights by a percent or more."""
    optim = OptimConfig(name="sgd", lr=1.0, clip_grad=0.0)
    config = Config(model=ModelConfig(path=str(path), dtype="float64"),
                    actor=ActorConfig(optim=optim, tokens_per_micro_batch=4096))
    config.fsdp = FsdpConfig(wrap_policy=WrapPolicy())
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        section = config
        for name in parents:
            section = getattr(section, name)
        assert hasattr(section, leaf), key
        setattr(section, leaf, value)
    return config


def make_worker(config: Config, want: tuple[str, ...] = ("log_probs", "entropy"), trainable: bool = True,
                head: str = "lm", total_updates: int | None = None, path: str | None = None, role: str = "actor") -> FsdpWorker:
    ranks = dist.get_world_size()
    layout = Fsdp.layout(config, ranks, 1)
    request = RoleRequest(trainable, path or config.model.path, config.model.dtype, head)
    spec = RoleSpec(role, "fsdp", request, config, Plugins.load(["fsdp"]), dist.get_rank(), torch.device("cpu"),
                    total_updates, frozenset(want))
    worker = spec.plugins.make_worker(spec=spec, layout=layout)
    assert isinstance(worker, FsdpWorker)
    return worker


def make_batch(lengths: tuple[int, ...] = (5, 9, 3, 7, 6, 9), prompt: int = 2, seed: int = 0) -> Batch:
    batch = random_batch(lengths, prompt, seed, torch.float64)
    batch.sequences["uid"] = [str(i) for i in range(len(lengths))]
    return batch


def my_shard(batch: Batch) -> Batch:
    return batch.select(shard(batch, dist.get_world_size())[dist.get_rank()])


def full_weights(worker: FsdpWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weights()}


def save(worker: FsdpWorker, directory: Path, contents: Sequence[str]) -> None:
    write = worker.spec.plugins.save_checkpoint(worker, directory, contents)
    assert write is not None
    write()


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2: the architecture that computes in float64 throughout, and to which positions are not just relative."""
    path = tmp_path_factory.mktemp("gpt2")
    save_tiny(path, "gpt2", **SIZES)
    return path


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama", tie_word_embeddings=True, **SIZES)
    return path


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions above, for tests (which cannot import a conftest)."""
    import types

    return types.SimpleNamespace(
        TokenLoss=TokenLoss, make_config=make_config, make_worker=make_worker, make_batch=make_batch, my_shard=my_shard,
        full_weights=full_weights, save=save)
