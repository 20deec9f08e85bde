"""What a training backend implements, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlrun.batch import Atom, Batch
    from rlrun.config.schema import Config, OptimConfig
    from rlrun.metrics import Value
    from rlrun.plugins import Plugins

Kind = Literal["tokens", "sequences", "groups", "gap", "constant", "max"]
"""What a term is divided by: the mini-batch's count of loss tokens, of sequences or groups that have any, of tokens in
`gap_mask`, or 1. "max" is for metrics alone: the largest value, over everything."""


class Term(NamedTuple):
    """One part of a loss, or a metric that is computed with it: a local sum, and what the global sum is divided by."""

    sum: Tensor  # scalar, summed over this micro-batch only
    kind: Kind
    coef: float = 0.0  # weight in the loss that is differentiated; 0 for a metric


Loss = Callable[[Mapping[str, "Tensor"], "Batch"], dict[str, Term]]
"""(outputs [T] by name, micro-batch of whole sequences) -> terms. Must be picklable. Outputs are those of `Worker.forward`,
with gradient; slots outside `loss_mask` hold any value and must not reach a sum (select, never multiply by the mask)."""


@dataclass(frozen=True)
class RoleRequest:
    """A model that an algorithm needs besides the actor."""

    trainable: bool
    path: str | None  # folder of the initial model; None: the policy as it is when the stage begins
    dtype: str
    head: Literal["lm", "value", "score"] = "lm"
    """A language model's own head; a scalar head of our own on its backbone; or a sequence classifier's own single output,
    which, like that of "value", is called `values`."""
    optim: OptimConfig | None = None
    updates_per_step: int | None = None
    """Optimizer steps in one step of the stage, for the learning-rate schedule; default: the actor's."""


@dataclass(frozen=True)
class RoleSpec:
    """All that a backend needs to build one role's model on one rank."""

    role: str
    backend: str
    request: RoleRequest
    config: Config
    plugins: Plugins
    rank: int
    device: torch.device
    total_updates: int | None
    """Optimizer steps of the stage, for the learning-rate schedule; None where epochs end it and nobody knows."""
    want: frozenset[str] = field(default_factory=lambda: frozenset({"log_probs"}))
    """Outputs that `update` computes for the loss: of log_probs, entropy, values."""


@dataclass(frozen=True)
class Layout:
    """How ranks share the work; computed on the driver before any process exists."""

    dp: int  # data-parallel size: a batch is cut into this many shards
    dp_index: tuple[int, ...]  # the shard that each rank works on
    result_ranks: tuple[int, ...]  # for each shard, the rank whose answer counts

    @property
    def ranks(self) -> int:
        return len(self.dp_index)


class SequenceParallel(Protocol):
    """Cuts a packed row over ranks and puts outputs together again; made by `patch_attention`."""

    size: int

    def shard(self, row: Tensor) -> Tensor:
        """This rank's part of a packed row: [T] -> [T'] (the last dimension), filled up with zeros to equal parts. For attention
        these zeros are a sequence of their own (`Packed.of`)."""

    def gather(self, output: Tensor, total: int) -> Tensor:
        """Whole row from the ranks' parts: [T'] -> [total]. The row's gradient is the same on all ranks, and each takes its
        own part of it: gradients of parameters must then be added over ranks."""


class Backend(Protocol):
    """The driver's view of a backend: the class that `provides` names. Import-light."""

    @staticmethod
    def layout(config: Config, ranks: int, sp: int) -> Layout:
        """How `ranks` processes share the work at sequence-parallel size `sp`. Raises ValueError where they cannot."""

    @staticmethod
    def memory_bytes(config: Config, parameters: int, layout: Layout, trainable: bool) -> int:
        """Estimate of what one rank holds for a model of so many parameters, activations not counted."""


class Worker(Protocol):
    """One rank's part of one role's model. All methods are collective: every rank calls them in the same order."""

    spec: RoleSpec

    def forward(self, batch: Batch, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        """Per-token columns [T] in the batch's order, without gradient, of whole sequences on every rank of the shard.

        `log_probs` and `entropy` (at `temperature`) are computed where `loss_mask` is set and 0 elsewhere;
        `values` likewise. `batch` is this rank's shard; it may be empty."""

    def update(self, batch: Batch, loss: Loss, denominators: Mapping[str, float], temperature: float, atom: Atom = "sequence",
               keep: dict[str, Tensor] | None = None) -> dict[str, Value]:
        """Accumulate gradients over micro-batches of `batch` (this rank's shard), then take one optimizer step.
        Log-probabilities and entropy are at `temperature`.

        `denominators` counts the whole mini-batch, over all shards, by kind; micro-batches keep every `atom` whole. Returns the
        loss's terms as (sum, count), and `grad_norm` (of the full gradient, before clipping), `lr` and `skipped` (1 where the
        gradient was not finite and nothing was changed), equal on all ranks, as maxima. Further metrics are the backend's own and
        named PLUGIN/...: of several updates and ranks `Value(a, b)` is sum a / sum b, and `Value(a)` the largest. `keep` is
        filled with the outputs that the update's own forward computed, of the model before the step: what `forward` would have
        returned."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under the names, shapes and order of content that save_pretrained writes."""

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        """Bring what was offloaded back to the device."""

    def offload(self, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters or optimizer state to host memory between phases."""
