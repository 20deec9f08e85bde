"""A batch, a loss and an update of them, for tests of what training backends compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rlrun.batch import Batch
from rlrun.config.schema import Config
from rlrun.metrics import results
from rlrun.testing.gloo import drive
from rlrun.testing.ranks import RankPool, _FirstRanks
from rlrun.workers.protocol import Kind, RoleRequest, Term


def random_batch(lengths: Sequence[int], prompt: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Random sequences of given lengths with `prompt` tokens outside the loss, in groups of two."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    total = int(cu_seqlens[-1])
    batch = Batch(cu_seqlens, {"ids": torch.randint(2, 258, (total,), generator=generator)})
    batch.tokens["loss_mask"] = batch.position_ids >= prompt
    for name in ("log_probs", "advantages"):
        batch.tokens[name] = torch.randn(total, generator=generator, dtype=dtype)
    batch.tokens["log_probs"] -= 5.5
    batch.sequences["group"] = torch.arange(len(lengths)) // 2
    return batch


@dataclass
class TokenLoss:
    """A policy gradient with entropy, or a squared error of values; masked slots never read."""

    kind: Kind = "tokens"

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        advantages = batch.tokens["advantages"][mask]
        if "values" in outputs:
            return {"loss": Term(((outputs["values"][mask] - advantages) ** 2).sum(), self.kind, 1.0)}
        ratio = (outputs["log_probs"][mask] - batch.tokens["log_probs"][mask]).exp()
        return {"loss": Term(-(ratio * advantages).sum(), self.kind, 1.0),
                "entropy": Term(outputs["entropy"][mask].sum(), "tokens", -0.1),
                "ratio_max": Term(ratio.detach().max() if len(ratio) else ratio.detach().new_tensor(0.0), "max")}


@dataclass
class Update:
    """What shows of optimizer steps: the last one's metrics, columns before the first, those that the last one kept, and the
    weights' movement, which at SGD's rate 1 is the gradient."""

    metrics: dict[str, float]
    columns: dict[str, Tensor]
    kept: dict[str, Tensor]
    gradients: dict[str, Tensor]


def update(pool: RankPool | _FirstRanks, config: Config, batch: Batch, head: Literal["lm", "value"] = "lm", kind: Kind = "tokens",
           updates: int = 1) -> Update:
    """Optimizer steps on a batch over all ranks of a pool, from the weights in the model's folder."""
    def script(workers: Any, plugins: Any, config: Config) -> Update:
        want = frozenset({"log_probs", "entropy"} if head == "lm" else {"values"})
        workers.build("actor", RoleRequest(True, config.model.path, config.model.dtype, head), 10, want)
        before = workers.call("weights", "actor")[0]
        columns = workers.forward("actor", batch, want, 0.7)
        for _ in range(updates):
            kept: dict[str, Tensor] = {}
            metrics = results(workers.update("actor", batch, TokenLoss(kind), batch.denominators(), 0.7, keep=kept))
        after = workers.call("weights", "actor")
        for other in after[1:]:
            assert all(torch.equal(other[name], weight) for name, weight in after[0].items())
        return Update(metrics, columns, kept, {name: before[name] - weight for name, weight in after[0].items()})

    result: Update = drive(pool, config, script)
    return result


def assert_same(got: Update, expected: Update, tolerance: float, columns: float | None = None) -> None:
    """Metrics and columns, and each parameter's gradient by ||a - b|| / ||b||."""
    assert got.metrics == pytest.approx(expected.metrics, rel=tolerance, abs=tolerance)
    for mine, theirs in ((got.columns, expected.columns), (got.kept, expected.kept)):
        assert mine.keys() == theirs.keys()
        for name, column in theirs.items():
            torch.testing.assert_close(mine[name], column, rtol=columns or tolerance, atol=columns or tolerance)
    assert got.gradients.keys() == expected.gradients.keys()
    assert sum(float(x.norm()) > 0 for x in expected.gradients.values()) > 0 or not expected.metrics["grad_norm"]
    for name, gradient in expected.gradients.items():
        # the bias of keys, of which attention is independent, has rounding errors for a gradient
        size = max(float(gradient.norm()), 1e-2 * expected.metrics["grad_norm"])
        assert (got.gradients[name] - gradient).norm() <= tolerance * size, name
