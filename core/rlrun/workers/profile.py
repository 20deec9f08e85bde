"""Traces of whole training steps by torch.profiler, under any backend whose section has a field `profile`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from rlrun.config.schema import Config, opt
from rlrun.errors import ConfigError

if TYPE_CHECKING:
    from rlrun.plugins import Plugins


@dataclass
class ProfileConfig:
    use_profile: bool = opt(False, "trace training steps with torch.profiler, each from its rollout to its last update")
    profile_ranks: Optional[list[int]] = opt(None, "training ranks that are traced; default: all")
    step_start: int = opt(1, "first traced step, as training/global_step counts", gt=0)
    step_end: int = opt(1, "last traced step", gt=0)
    save_path: Optional[str] = opt(None, "folder for the traces; default: profile, in the run's folder")

    def traces(self, step: int) -> bool:
        return self.use_profile and self.step_start <= step <= self.step_end


def profile_of(config: Config, plugins: Plugins) -> ProfileConfig:
    """What the backend's section says. Raises ConfigError where nothing could be traced."""
    name = plugins.provider("backend", config.actor.backend)
    profile: ProfileConfig = getattr(getattr(config, name, None), "profile", None) or ProfileConfig()
    if profile.use_profile and profile.step_end < profile.step_start:
        raise ConfigError(f"{name}.profile.step_end = {profile.step_end} is before step_start = {profile.step_start}")
    ranks = config.resources.train_ranks
    if profile.use_profile and not set(profile.profile_ranks or ()) <= set(range(ranks)):
        raise ConfigError(f"{name}.profile.profile_ranks = {profile.profile_ranks}; training ranks are 0 to {ranks - 1}")
    return profile


def begin_trace(config: Config, plugins: Plugins, rank: int, step: int) -> Callable[[], None]:
    """Trace this process, where its rank is chosen, until the function that is returned is called and writes the trace."""
    import torch

    profile = profile_of(config, plugins)
    if profile.profile_ranks is not None and rank not in profile.profile_ranks:
        return lambda: None
    folder = Path(profile.save_path or Path(config.run.dir, config.run.name, "profile"))
    trace = torch.profiler.profile()
    trace.start()

    def write() -> None:
        trace.stop()
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"step_{step:06d}_rank_{rank}.json.gz"))

    return write
