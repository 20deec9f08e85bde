"""A curriculum, as a plugin in one file: a source of prompts whose difficulty rises.

`rl-run examples/curriculum.yaml -p fsdp,examples/curriculum.py` trains with it. A run draws rows in this order where
`data.shuffle` is false, and goes on in it after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlrun.config.schema import SourceConfig
from rlrun.data.sample import Row
from rlrun.data.sources import ReasoningGym
from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl


class Curriculum:
    """Rows of a reasoning-gym data set, level after level as reasoning-gym's own curriculum for it says.

    `path` is the data set's name. Of `options`, `levels` is the number of levels, `size` the rows of each; what else is
    there goes to reasoning-gym, and keeps its value at all levels. Rows of level 2 have the data source NAME_level2.
    """

    def __init__(self, config: SourceConfig) -> None:
        from reasoning_gym.factory import create_curriculum

        self.config, self.curriculum = config, create_curriculum(config.path)
        self.options = dict(config.options)
        self.levels = int(self.options.pop("levels", 3))
        most = max((len(attribute.levels) for attribute in self.curriculum.attributes.values()), default=0)
        if not 1 <= self.levels <= most:
            raise ValueError(f"data source {config.path}: options.levels is {self.levels}; reasoning-gym has 1 to {most} levels")

    def rows(self) -> Iterator[Row]:
        name, seed = self.config.name or self.config.path, int(self.options.get("seed", 0))
        for level in range(self.levels):
            self.curriculum.set_global_level(level)
            options = {**vars(self.curriculum.generate_configuration()), **self.options, "seed": seed + level}
            yield from ReasoningGym(replace(self.config, name=f"{name}_level{level + 1}", options=options)).rows()


@hookimpl
def plugin_info() -> PluginInfo:
    return PluginInfo("curriculum", API_VERSION, provides={"source": {"curriculum": "curriculum:Curriculum"}})
