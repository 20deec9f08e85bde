"""Everything a plugin can change: the hooks, and the descriptors that they exchange.

A plugin is an import-light module (or instance) with functions marked `@rlrun.hookspecs.hookimpl`, named by an entry point
of group `rlrun.plugins`. Hooks are called with keywords, only through `rlrun.plugins.Plugins`, which names plugin and hook
in every error. A hook implementation may leave out parameters that it does not need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from rlrun.batch import Batch
    from rlrun.config.schema import Config
    from rlrun.workers.protocol import Layout, RoleSpec, SequenceParallel, Worker

API_VERSION = 1  # raised when a hook or descriptor changes so that older plugins break

KINDS = ("backend", "algorithm", "rollout", "reward", "environment", "tracker", "source")
"""Kinds of things that a plugin can provide by name."""

hookspec = pluggy.HookspecMarker("rlrun")
hookimpl = pluggy.HookimplMarker("rlrun")


@dataclass(frozen=True)
class PluginInfo:
    """What a plugin is and offers; known without importing anything heavy.

    `provides` maps a kind (see KINDS) to names and the class that each stands for, as "package.module:Class". A class is
    imported only when the configuration chooses its name. `config` is the dataclass of the plugin's own section, which
    stands under `name` in the configuration."""

    name: str
    api_version: int
    config: type | None = None
    provides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Of algorithms that it provides: fields of the stage's options that the name sets, before the user's own values. One that
    sets `advantage` is a policy gradient, and its options are checked like those of core's."""
    sequence_parallel: Callable[[Config], int] | None = None
    """Of a plugin that answers `patch_attention`: how many ranks share a sequence under a configuration. Called on the driver,
    before any rank starts; raises ValueError for a size that cannot be."""


@dataclass(frozen=True)
class Step:
    """What `compute_metrics` sees: one finished step of a stage."""

    number: int
    stage: int
    config: Config
    batch: Batch
    metrics: Mapping[str, float]  # core's metrics of this step, under their final names


class Hooks(Protocol):
    """The hooks. "Every rank" means each training process, which may be the driver itself (launcher: local)."""

    @hookspec
    def plugin_info(self) -> PluginInfo:
        """Describe the plugin. Driver and every rank, once at load; each plugin answers for itself."""

    @hookspec
    def make_worker(self, spec: RoleSpec, layout: Layout) -> Worker:
        """Build this rank's part of the model of one role. Every rank, once a role and stage; collective.

        Called only on the plugin that provides `spec.backend`, which must return a Worker."""

    @hookspec
    def patch_attention(self, model: nn.Module, spec: RoleSpec, mesh: DeviceMesh) -> SequenceParallel | None:
        """Let one sequence span ranks. Every rank, once a role, after the model is built and before it is sharded.

        `mesh` has the dimensions "dp" and "sp". At most one plugin may answer with other than None."""

    @hookspec
    def save_checkpoint(self, worker: Worker, directory: Path, contents: Sequence[str]) -> Callable[[], None] | None:
        """Write `contents` of a worker (of: model, optimizer, extra, hf_model) to `directory`. Every rank; collective.

        May only copy the state, and return what then writes it. That is called once, on every rank, in a thread beside
        training where checkpoint.async_save is set; so it must use no process group that training uses.

        Called only on the plugin that made the worker. hf_model goes to `directory / "hf"`, everything else directly into
        `directory`. A full disk may surface as OSError on any rank."""

    @hookspec
    def load_checkpoint(self, worker: Worker, directory: Path, contents: Sequence[str]) -> None:
        """Restore what `save_checkpoint` wrote, at any number of ranks. Every rank; collective."""

    @hookspec
    def compute_metrics(self, step: Step) -> dict[str, float]:
        """Further metrics of a step. Driver, once a step, all plugins; every key begins with the plugin's name and "/"."""
