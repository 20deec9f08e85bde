"""Stand-ins for tests of plugins: workers and an engine without a model, and a record of the hooks that are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlrun.metrics import Value
from rlrun.rollout.protocol import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from rlrun.batch import Atom, Batch
    from rlrun.config.schema import Config
    from rlrun.plugins import Plugins
    from rlrun.workers.protocol import Loss, RoleRequest


class FakeWorkers:
    """A `rlrun.workers.group.WorkerGroup` whose roles compute a smooth function of each token's id and the role's one weight.

    An update differentiates the loss and moves that weight against its gradient by `lr`. `calls` notes (method, role)."""

    def __init__(self, roles: Iterable[str] = (), lr: float = 0.1) -> None:
        self.weights = {role: torch.tensor(0.1 * i, dtype=torch.float64) for i, role in enumerate(roles)}
        self.roles: dict[str, RoleRequest] = {}
        self.lr = lr
        self.calls: list[tuple[str, str]] = []

    def outputs(self, role: str, batch: Batch, want: AbstractSet[str], weight: Tensor | None = None) -> dict[str, Tensor]:
        """Per-token columns [T] in float64: log_probs below 0, entropy above 0, values around 0; 0 outside `loss_mask`."""
        x = batch.tokens["ids"].double() + batch.position_ids / 7
        w = self.weights[role] if weight is None else weight
        columns = {"log_probs": -1.5 + torch.sin(x + w), "entropy": 1.5 + torch.cos(x + w), "values": torch.sin(2 * x + w)}
        return {name: torch.where(batch.tokens["loss_mask"], columns[name], 0.0) for name in want}

    def forward(self, role: str, batch: Batch, want: AbstractSet[str], temperature: float,
                atom: Atom = "sequence") -> dict[str, Tensor]:
        self.calls.append(("forward", role))
        return self.outputs(role, batch, want)

    def update(self, role: str, batch: Batch, loss: Loss, denominators: Mapping[str, float], temperature: float,
               atom: Atom = "sequence", keep: dict[str, Tensor] | None = None) -> dict[str, Value]:
        self.calls.append(("update", role))
        weight = self.weights[role].clone().requires_grad_()
        outputs = self.outputs(role, batch, {"log_probs", "entropy", "values"}, weight)
        if keep is not None:
            keep.update({name: column.detach() for name, column in outputs.items()})
        terms = loss(outputs, batch)
        total = sum((t.sum * t.coef / (denominators[t.kind] or 1.0) for t in terms.values() if t.kind != "max"), 0.0 * weight)
        [gradient] = torch.autograd.grad(total, weight)
        self.weights[role] = self.weights[role] - self.lr * gradient
        values = {name: Value(float(t.sum.detach())) if t.kind == "max" else Value(float(t.sum.detach()), denominators[t.kind])
                  for name, t in terms.items()}
        return {**values, "grad_norm": Value(abs(float(gradient))), "lr": Value(self.lr), "skipped": Value(0.0)}


class FakeEngine:
    """A rollout engine that says `answer`, token by token, whatever it is asked. `requests` notes what it was asked."""

    answer: tuple[int, ...] = (2, 3, 1)

    def __init__(self, config: Config, device: torch.device, rank: int) -> None:
        self.policy_version = -1
        self.requests: list[Request] = []

    @staticmethod
    def ranks_per_engine(config: Config) -> int:
        return 1

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        if self.policy_version < 0:
            raise RuntimeError("asked to generate before any weights were loaded")
        self.requests += requests
        ids = self.answer[: params.max_new_tokens]
        reason = "stop" if ids and ids[-1] in params.eos_ids else "length"
        return [Completion(r.index, ids, (-1.0,) * len(ids), reason, self.policy_version)  # type: ignore[arg-type]
                for r in requests]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:  # the stream is collective: it must be read to its end
            pass
        self.policy_version = version

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Nothing sleeps here."""

    def sleep(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to let go of."""


@contextmanager
def recorded_hooks(plugins: Plugins) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The hooks that are called meanwhile in this process, in order: (name, arguments)."""
    calls: list[tuple[str, dict[str, Any]]] = []
    undo = plugins._manager.add_hookcall_monitoring(
        lambda name, impls, kwargs: calls.append((name, dict(kwargs))), lambda outcome, name, impls, kwargs: None)
    try:
        yield calls
    finally:
        undo()
