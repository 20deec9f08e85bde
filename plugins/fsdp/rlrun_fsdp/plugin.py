"""Entry module of the FSDP2 backend: what it offers and its hooks. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from rlrun.config.schema import opt
from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl
from rlrun.workers.profile import ProfileConfig

if TYPE_CHECKING:
    from rlrun.workers.protocol import Layout, RoleSpec, Worker


@dataclass
class WrapPolicy:
    min_num_params: int = opt(0, "layers with fewer parameters are sharded together with the root", ge=0)
    layer_classes: list[str] = opt([], "classes of the modules that are sharded each; default: the model's decoder layers")


@dataclass
class LoraConfig:
    rank: int = opt(0, "rank of adapters, the only parameters of language models that train then; 0: none", ge=0)
    alpha: int = opt(16, "adapters are scaled by alpha / rank", gt=0)
    target_modules: list[str] = opt(["all-linear"], "names of the adapted modules, such as q_proj")


@dataclass
class FsdpConfig:
    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    shard_size: Optional[int] = opt(None, "ranks that share one replica of the parameters; default: all ranks", gt=0)
    reshard_after_forward: Optional[bool] = opt(
        None, "free a layer's gathered parameters after use, and reduce gradients in each micro-batch; default: where the "
        "whole model with its gradients takes more than a quarter of the device's memory")
    compile: Optional[bool] = opt(None, "compile decoder layers; default: on a GPU")
    checkpoint_every: int = opt(1, "with model.gradient_checkpointing: recompute every n-th layer only; 1: all", gt=0)
    offload_params: bool = opt(False, "move parameters to host memory while another role or the engine works")
    offload_optimizer: bool = opt(False, "likewise the optimizer's state")
    cpu_offload: bool = opt(False, "keep parameters, gradients and optimizer state in host memory, and update them there")
    lora: LoraConfig = field(default_factory=LoraConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@hookimpl
def plugin_info() -> PluginInfo:
    provides = {"backend": {"fsdp": "rlrun_fsdp.backend:Fsdp"}}
    return PluginInfo(name="fsdp", api_version=API_VERSION, config=FsdpConfig, provides=provides)


@hookimpl
def make_worker(spec: RoleSpec, layout: Layout) -> Worker:
    from rlrun_fsdp.worker import make

    return make(spec, layout)


@hookimpl
def save_checkpoint(worker: Worker, directory: Path, contents: Sequence[str]) -> Callable[[], None]:
    from rlrun_fsdp import checkpoint
    from rlrun_fsdp.worker import FsdpWorker

    assert isinstance(worker, FsdpWorker)
    return checkpoint.save(worker, directory, contents)


@hookimpl
def load_checkpoint(worker: Worker, directory: Path, contents: Sequence[str]) -> None:
    from rlrun_fsdp import checkpoint
    from rlrun_fsdp.worker import FsdpWorker

    assert isinstance(worker, FsdpWorker)
    checkpoint.load(worker, directory, contents)
