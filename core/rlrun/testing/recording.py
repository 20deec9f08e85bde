"""Find options that nothing reads: a configuration that notes which of its keys are looked at."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

C = TypeVar("C")

_NOT_READERS = ("rlrun.config", "dataclasses", "copy", "pickle", "omegaconf", "cloudpickle")
"""Modules that read every key to check, copy or write the configuration."""


def recording(config: C) -> tuple[C, set[str]]:
    """A stand-in for `config` and the set of leaf keys read from it so far, without list indices ("data.train.path").

    The stand-in is of a subclass of the same dataclass. Reads by `rlrun.config`, `dataclasses`, `copy` and the like do
    not count. A list of sections counts as read only by the keys of its items.
    """
    read: set[str] = set()
    return _stand_in(config, "", read), read


def leaf_keys(kind: type[Any], key: str = "") -> set[str]:
    """All leaf keys of a dataclass, those of sections in lists included, without list indices."""
    hints = get_type_hints(kind)
    keys = set()
    for field in fields(kind):
        full = f"{key}.{field.name}".lstrip(".")
        inner = [k for k in (hints[field.name], *get_args(hints[field.name])) if is_dataclass(k)]
        keys |= leaf_keys(inner[0], full) if inner else {full}  # type: ignore[arg-type]
    return keys


def _stand_in(section: Any, key: str, read: set[str]) -> Any:
    cls = type(section)
    leaves = leaf_keys(cls)

    def noted(self: Any, name: str) -> Any:
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if name in leaves and not any(reader == one or reader.startswith(f"{one}.") for one in _NOT_READERS):
            read.add(f"{key}.{name}".lstrip("."))
        return object.__getattribute__(self, name)

    recorder = type(cls.__name__, (cls,), {"__getattribute__": noted, "__module__": cls.__module__})
    made: Any = object.__new__(recorder)
    for name, value in vars(section).items():
        full = f"{key}.{name}".lstrip(".")
        if is_dataclass(value):
            value = _stand_in(value, full, read)
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            value = [_stand_in(item, full, read) for item in value]
        object.__setattr__(made, name, value)
    return made
