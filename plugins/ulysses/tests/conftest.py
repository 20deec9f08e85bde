from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.batch import Batch
from rlrun.config.schema import ActorConfig, Config, ModelConfig, OptimConfig
from rlrun.plugins import Plugins
from rlrun.testing import plain, updates
from rlrun.testing.contracts.base import configure
from rlrun.testing.ranks import RankPool, ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import Update, random_batch, update

PLUGINS = [plain.__file__, "ulysses"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def make_config(path: str | Path, size: int, dtype: str = "float64", **sections: dict[str, Any]) -> Config:
    """A config of tiny runs: SGD at rate 1, so that weights move by the gradient."""
    optim = OptimConfig(name="sgd", lr=1.0, clip_grad=0.0)
    config = Config(model=ModelConfig(path=str(path), dtype=dtype),
                    actor=ActorConfig(backend="plain", optim=optim, tokens_per_micro_batch=4096))
    return configure(config, Plugins.load(PLUGINS), {"ulysses": {"size": size}}, sections)


def make_batch(*lengths: int, masked: Any = None, seed: int = 0) -> Batch:
    """Random sequences in float64, the first token of each outside the loss, or all but those of `masked`."""
    batch = random_batch(lengths, 1, seed, torch.float64)
    if masked is not None:
        batch.tokens["loss_mask"] = torch.tensor([t in masked for t in range(batch.num_tokens)])
    batch.sequences["group"] = torch.arange(len(lengths))
    return batch


def assert_same(got: Update, expected: Update, tolerance: float = 1e-9, columns: float | None = None) -> None:
    updates.assert_same(got, expected, tolerance, columns)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2: the architecture that computes in float64 throughout, and to which positions are not just relative."""
    path = tmp_path_factory.mktemp("gpt2")
    save_tiny(path, "gpt2", **SIZES)
    return path


@pytest.fixture(scope="session")
def ranks4() -> RankPool:
    return RankPool(4)


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions above, for tests (which cannot import a conftest)."""
    import types

    return types.SimpleNamespace(make_config=make_config, make_batch=make_batch, update=update, assert_same=assert_same,
                                 SIZES=SIZES)
