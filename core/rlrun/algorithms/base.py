"""An algorithm: one object a stage, made on the driver from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlrun.batch import Atom, Batch
    from rlrun.config.schema import Config, StageConfig
    from rlrun.data.sample import Sample
    from rlrun.metrics import Value
    from rlrun.workers.group import WorkerGroup
    from rlrun.workers.protocol import Loss, RoleRequest


class Algorithm:
    """Base of all algorithms. A subclass says which models it needs, which groups it keeps, and what is learned from them.

    The trainer calls, each step: `select` (while collecting), `score`, `advantages`, then updates each trainable role with
    `losses`, then `observe`. Everything here runs on the driver, except the losses, which are pickled and run in the ranks."""

    online = True  # whether the policy generates the completions; otherwise they are those of `completions` (sft, dpo)
    needs_old_log_probs = False
    """Whether `advantages` or `score` need the actor's log-probabilities from before the step's updates. They are computed
    anyway where a step makes more than one update."""
    greedy_baseline = False
    """Whether each prompt also gets a greedy completion, whose reward is the column `baseline_reward` of its samples."""
    atom: Atom = "sequence"  # what micro-batches and shards must keep whole for the losses

    def __init__(self, config: Config, stage: StageConfig) -> None:
        self.config = config
        self.stage = stage
        self.options = stage.algorithm
        self.leftovers: list[Batch] = []  # prompt groups that the next step begins with

    @property
    def temperature(self) -> float:
        """Of all log-probabilities of the stage: that of sampling; offline, the model's own distribution."""
        return self.config.rollout.temperature if self.online else 1.0

    def roles(self) -> dict[str, RoleRequest]:
        """Models besides the actor, by role, in the order in which they are built and updated."""
        return {}

    def wants(self) -> dict[str, frozenset[str]]:
        """Outputs that the losses of each trained role need: of log_probs, entropy, values. Default: log_probs."""
        return {}

    def completions(self, sample: Sample) -> list[Any]:
        """Offline: the texts to learn from, the preferred one first. Called for every sample before the run begins.

        Raises ValueError for a sample that is no use. Default: the answer."""
        return [sample.answer]

    def draws(self, missing: int) -> int:
        """How many prompts to draw while so many groups are missing; more than these may leave groups over. Default: as many."""
        return missing

    def leave(self, groups: list[Batch]) -> None:
        """Take in selected groups beyond what a step needs. Default: they are dropped."""

    def drawn(self, groups: Sequence[Batch]) -> dict[str, Value]:
        """Metrics of all groups that a step drew, selected or not. Default: none."""
        return {}

    def select(self, groups: Sequence[Batch]) -> list[bool]:
        """Which prompt groups (each a batch of one prompt's samples) to keep. Default: all."""
        return [True] * len(groups)

    def score(self, batch: Batch, workers: WorkerGroup) -> dict[str, Value]:
        """Add per-token columns that need a model, perhaps training it. Default: nothing."""
        return {}

    def advantages(self, batch: Batch) -> dict[str, Value]:
        """Add the columns that the losses read (`advantages`, `returns`). Returns metrics."""
        return {}

    def losses(self, step: int) -> Mapping[str, Loss]:
        """The loss of each role to update in step `step` of the stage (from 0), picklable."""
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> dict[str, Value]:
        """Offline: metrics of held-out completions with `log_probs` and, where there is that role, `ref_log_probs`."""
        return {}

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in what a step measured, under its final names, for coefficients that adapt. Default: nothing."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as JSON-able data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
