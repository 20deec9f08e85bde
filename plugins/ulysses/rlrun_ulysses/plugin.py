"""Entry module of Ulysses: its section, its degree and its hook. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rlrun.config.schema import opt
from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from rlrun.config.schema import Config
    from rlrun.workers.protocol import RoleSpec, SequenceParallel


@dataclass
class UlyssesConfig:
    size: int = opt(1, "ranks that share each sequence; divides resources.train_ranks and the model's attention heads", gt=0)


def degree(config: Config) -> int:
    """ulysses.size. Raises ValueError where the policy, reference or critic cannot be spread over so many ranks."""
    size = config.section("ulysses", UlyssesConfig).size
    for path in dict.fromkeys((config.model.path, config.ref.path, config.critic.path)):
        if size > 1 and path is not None:
            _check_folder(path, size)
    return size


@cache
def _check_folder(path: str, size: int) -> None:
    from rlrun.models.folder import load_config
    from rlrun_ulysses.heads import check_model

    check_model(load_config(path), size, path)


@hookimpl
def plugin_info() -> PluginInfo:
    return PluginInfo(name="ulysses", api_version=API_VERSION, config=UlyssesConfig, sequence_parallel=degree)


@hookimpl
def patch_attention(model: PreTrainedModel, spec: RoleSpec, mesh: DeviceMesh) -> SequenceParallel | None:
    size = spec.config.section("ulysses", UlyssesConfig).size
    if size == 1:
        return None
    from rlrun_ulysses.heads import check_model
    from rlrun_ulysses.sequence_parallel import Ulysses

    check_model(model.config, size, spec.request.path or type(model).__name__)
    ulysses = Ulysses(mesh.get_group("sp"))
    assert ulysses.size == size, f"the backend's mesh has {ulysses.size} ranks for ulysses.size = {size}"
    ulysses.attach(model)
    return ulysses
