from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.batch import Batch
from rlrun.config.schema import ActorConfig, Config, ModelConfig, OptimConfig
from rlrun.metrics import results
from rlrun.testing.gloo import drive
from rlrun.testing.ranks import RankPool, ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import TokenLoss, random_batch
from rlrun.workers.protocol import RoleRequest
from rlrun_fsdp.plugin import FsdpConfig
from rlrun_ulysses.plugin import UlyssesConfig

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@dataclass
class Update:
    """What `update` shows of one optimizer step: metrics, columns before it, and gradients by parameter."""

    metrics: dict[str, float]
    columns: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def make_config(path: str | Path, size: int, dtype: str = "float64", **sections: dict[str, Any]) -> Config:
    """A config of tiny runs: SGD at rate 1, so that weights move by the gradient."""
    optim = OptimConfig(name="sgd", lr=1.0, clip_grad=0.0)
    config = Config(plugins=["fsdp", "ulysses"], model=ModelConfig(path=str(path), dtype=dtype),
                    actor=ActorConfig(optim=optim, tokens_per_micro_batch=4096))
    config.fsdp, config.ulysses = FsdpConfig(), UlyssesConfig(size)
    for name, values in sections.items():
        section = getattr(config, name)
        assert values.keys() <= {field.name for field in fields(section)}
        vars(section).update(values)
    return config


def make_batch(*lengths: int, masked: Any = None, seed: int = 0) -> Batch:
    """Random sequences in float64, the first token of each outside the loss, or all but those of `masked`."""
    batch = random_batch(lengths, 1, seed, torch.float64)
    if masked is not None:
        batch.tokens["loss_mask"] = torch.tensor([t in masked for t in range(batch.num_tokens)])
    batch.sequences["group"] = torch.arange(len(lengths))
    return batch


def update(pool: Any, config: Config, batch: Batch, head: str = "lm", kind: str = "tokens") -> Update:
    """One optimizer step on a batch over all ranks of a pool, from the weights in the model's folder."""
    def script(workers: Any, plugins: Any, config: Config) -> Update:
        want = frozenset({"log_probs", "entropy"} if head == "lm" else {"values"})
        workers.build("actor", RoleRequest(True, config.model.path, config.model.dtype, head), 10, want)
        before = workers.call("weights", "actor")[0]
        columns = workers.forward("actor", batch, want, 0.7)
        metrics = results(workers.update("actor", batch, TokenLoss(kind), batch.denominators(), 0.7))
        after = workers.call("weights", "actor")
        for other in after[1:]:
            assert all(torch.equal(other[name], weight) for name, weight in after[0].items())
        return Update(metrics, columns, {name: before[name] - weight for name, weight in after[0].items()})

    result: Update = drive(pool, config, script)
    return result


def assert_same(got: Update, expected: Update, tolerance: float = 1e-9, columns: float | None = None) -> None:
    """Metrics and columns, and each parameter's gradient by ||a - b|| / ||b||."""
    assert got.metrics == pytest.approx(expected.metrics, rel=tolerance, abs=tolerance)
    for name, column in expected.columns.items():
        torch.testing.assert_close(got.columns[name], column, rtol=columns or tolerance, atol=columns or tolerance)
    assert got.gradients.keys() == expected.gradients.keys()
    assert sum(float(x.norm()) > 0 for x in expected.gradients.values()) > 0 or not expected.metrics["grad_norm"]
    for name, gradient in expected.gradients.items():
        # the bias of keys, of which attention is independent, has rounding errors for a gradient
        size = max(float(gradient.norm()), 1e-3 * expected.metrics["grad_norm"])
        assert (got.gradients[name] - gradient).norm() <= tolerance * size, name


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
