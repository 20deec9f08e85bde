from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.batch import Batch
from rlrun.config.schema import ActorConfig, AlgorithmConfig, Config, ModelConfig, OptimConfig, StageConfig
from rlrun.testing import plain
from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import save_tiny
from rlrun_prime.algorithm import Prime
from rlrun_prime.plugin import PrimeConfig

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def make_config(path: Any = "nowhere", prime: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    """One stage of PRIME on a float64 model; the reward model learns by SGD."""
    sgd = {"name": "sgd", "clip_grad": 0.0}
    options = {"name": "prime", "advantage": "rloo", "prompts_per_step": 4, **algorithm}
    config = Config(plugins=[plain.__file__, "prime"], model=ModelConfig(path=str(path), dtype="float64"),
                    stages=[StageConfig(AlgorithmConfig(**options), steps=2)],
                    actor=ActorConfig(backend="plain", optim=OptimConfig(lr=1.0, **sgd), tokens_per_micro_batch=4096))
    config.prime = PrimeConfig(**{"optim": OptimConfig(lr=20.0, **sgd), **(prime or {})})
    return config


def make(prime: dict[str, Any] | None = None, path: Any = "nowhere", **algorithm: Any) -> Prime:
    config = make_config(path, prime, **algorithm)
    return Prime(config, config.stages[0])


def ragged(masks: Any, groups: Any, correct: Any, **columns: Any) -> Batch:
    """Sequences of one prompt token and one token for each entry of their mask; columns have an entry for each of these tokens,
    and NaN on prompts."""
    batch = Batch.from_sequences([{"ids": [0] * (1 + len(m)), "loss_mask": [False, *map(bool, m)]} for m in masks])
    for name, rows in columns.items():
        flat = [x for row in rows for x in (torch.nan, *row)]
        batch.tokens[name] = torch.tensor(flat, dtype=torch.float64)
    outcomes = torch.tensor(correct, dtype=torch.float64)
    batch.sequences = {"group": torch.tensor(groups), "correct": outcomes, "reward": outcomes.clone(),
                       "finish_reason": ["stop"] * len(masks)}
    return batch


def of_rows(column: torch.Tensor, batch: Batch) -> list[list[float]]:
    """A per-token column by sequence, without prompts."""
    return [part[1:].tolist() for part in column.split(batch.lengths.tolist())]


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2: the architecture that computes in float64 throughout."""
    path = tmp_path_factory.mktemp("gpt2")
    save_tiny(path, "gpt2", **SIZES)
    return path


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions above, for tests (which cannot import a conftest)."""
    return types.SimpleNamespace(make_config=make_config, make=make, ragged=ragged, of_rows=of_rows)
