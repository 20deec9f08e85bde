"""What all suites share: that nothing of them is overridden, and what holds for every plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

import pytest

from rlrun.config.schema import Config
from rlrun.config.values import compose, keys_of, typed, unknown
from rlrun.discovery import GROUP
from rlrun.plugins import Plugins

_SUITES = f"{__name__.rpartition('.')[0]}."


class Contract:
    """Base of the suites. What a suite annotates in its class body, a subclass gives; the rest it cannot change.

    Raises TypeError, as the subclass is made and again as its tests begin, for a test, fixture or tolerance that is overridden
    (in a base beside the suite too), and for what is not given."""

    plugins: ClassVar[list[str]]
    """The plugin list, as in a configuration; the plugin that is tested comes last."""
    sections: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Fields of the configuration that differ from their defaults, by section: {"fsdp": {"shard_size": 1}}."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__module__.startswith(_SUITES):
            cls.check_whole()

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def whole(cls) -> None:
        """Checks again as tests begin: nothing was put into the class meanwhile, or made without `__init_subclass__`."""
        cls.check_whole()

    @classmethod
    def check_whole(cls) -> None:
        suites = [base for base in cls.__mro__ if base.__module__.startswith(_SUITES)]
        gives = {name for suite in suites for name in vars(suite).get("__annotations__", ())}
        fixed = {name for suite in suites for name in vars(suite) if not name.startswith("__")} - gives
        for name in sorted(fixed):
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if owner not in suites:
                raise TypeError(f"{owner.__name__}.{name} overrides {suites[0].__name__}.{name}, which is part of the contract; "
                                f"a subclass gives only: {', '.join(sorted(gives))}")
        if not getattr(cls, "__test__", True):
            raise TypeError(f"{cls.__name__}.__test__ hides the tests of {suites[0].__name__} from pytest")
        if missing := sorted(name for name in gives if not hasattr(cls, name)):
            raise TypeError(f"{cls.__name__} must give {', '.join(missing)}: see {suites[0].__name__}")


class PluginContract(Contract):
    """What holds for every plugin, whatever it provides."""

    def test_entry_module_is_light(self) -> None:
        """`rl-run --help` and `plugins --inspect` import entry modules: they must load no torch, transformers or ray."""
        tested = Plugins.load(self.plugins).names[-1]
        for module in {entry.module for entry in entry_points(group=GROUP) if entry.name == tested}:
            code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stdout.strip() == "[]", f"{module} loads {done.stdout.strip()}"

    def test_what_is_provided_can_be_made(self) -> None:
        """Every class that `provides` names can be imported, and options have names and descriptions."""
        plugins = Plugins.load(self.plugins)
        info = plugins.infos[-1]
        for kind, names in info.provides.items():
            for name in names:
                plugins.resolve(kind, name)
        defaults: Any = info.config() if info.config else None
        for field in fields(defaults) if defaults else ():
            described = field.metadata.get("help") or is_dataclass(getattr(defaults, field.name))
            assert described, f"{info.name}.{field.name} has no description: make it with rlrun.config.schema.opt"


def configure(config: Config, plugins: Plugins, *sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """Give a configuration the sections of its plugins, and fields of sections other values. Nested sections take a mapping.

    Raises ValueError for a key that is not there, and for a value that a configuration could not have."""
    config.plugins = [item for item, _ in plugins.recipe]
    for info in plugins.infos:
        if info.config and not hasattr(config, info.name):
            setattr(config, info.name, info.config())
    for name, values in (item for changes in sections for item in changes.items()):
        _set(getattr(config, name), values, name)
    return config


def _set(section: Any, values: Mapping[str, Any], key: str) -> None:
    known, problems = keys_of(type(section)), list[str]()
    for name, value in values.items():
        path = f"{key}.{name}"
        if name not in known:
            raise ValueError(unknown(path, known))
        if isinstance(value, Mapping) and is_dataclass(getattr(section, name)):
            _set(getattr(section, name), value, path)
        elif is_dataclass(value):
            setattr(section, name, value)
        else:
            setattr(section, name, typed(compose(json.dumps(value), path), known[name], path, problems))
    if problems:
        raise ValueError("; ".join(problems))
