"""Reward from a function of the user's."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlrun.rewards.protocol import RewardItem


class FunctionReward:
    """Calls what `path` names: "file.py:name", or "package.module:name" (the working directory counts too).

    A function is called as `function(item, **kwargs)`; a class is made once with `kwargs`, and its object called with
    each item. Either returns what `Reward` may return."""

    def __init__(self, path: str, **kwargs: Any) -> None:
        target = load_object(path)
        if not callable(target):
            raise ValueError(f"reward {path!r} is not a function or class, but {type(target).__name__}")
        if not inspect.isclass(target):
            inspect.signature(target).bind(None, **kwargs)  # names that it does not take show now, not at each sample
        made: Any = target(**kwargs) if inspect.isclass(target) else functools.partial(target, **kwargs)
        self.function: Callable[[RewardItem], Any] = made

    def __call__(self, item: RewardItem) -> Any:
        return self.function(item)


def load_object(path: str) -> Any:
    """What "file.py:name" or "package.module:name" stands for. Raises ValueError where there is no such thing."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ValueError(f"{path!r} must look like file.py:name or package.module:name")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"{path!r}: there is no file {Path(place).absolute()}")
        module = load_file(f"rlrun_reward_{Path(place).stem}", place)
    else:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise ValueError(f"{path!r}: {place} has no {name!r}")
    return getattr(module, name)


def load_file(name: str, path: str) -> Any:
    """Import the file `path` as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
