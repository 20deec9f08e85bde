"""YAML to typed values, guided by the dataclasses of the configuration.

A scalar is converted from its text by the type of its key, never guessed from its look: `path: 1e-5`, `name: 007` and
`name: yes` stay text, `lr: 1e-5` is a float, `kl_in: off` is no boolean. Only open mappings (Any) follow YAML's rules."""

import re
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from rlrun.errors import ConfigError

NULL, STR = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_FLOAT, _TIMESTAMP = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MEANING = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without timestamps, with floats like 1e-6, and with an error for a key given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_FLOAT, re.compile(
    r"[-+]?((\d[\d_]*\.[\d_]*|\.\d[\d_]*)(e[-+]?\d+)?|\d[\d_]*e[-+]?\d+|\.(inf|nan))$", re.I), list("-+0123456789."))


def compose(text: str, where: str) -> yaml.Node:
    """Parse YAML without interpreting scalars; an empty text is null. Raises ConfigError, which says `where`."""
    try:
        return yaml.compose(text, Loader=_Loader) or yaml.ScalarNode(NULL, "")
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


def override_node(text: str, kind: Any, key: str) -> yaml.Node:
    """What stands behind the first "=" of a command-line override: text as it is for text keys, otherwise YAML."""
    if unwrap(kind)[0] is str:
        return yaml.ScalarNode(NULL if text == "null" else STR, text)
    return compose(text, key)


def typed(node: yaml.Node, kind: Any, key: str, problems: list[str]) -> Any:
    """The plain value of a node for a key of type `kind`. What is wrong with it is added to `problems`.

    Interpolations and ??? are left to OmegaConf."""
    kind, optional = unwrap(kind)
    if isinstance(node, yaml.ScalarNode):
        if node.tag == NULL:
            if not optional:
                problems.append(f"{key}: null, but it needs {_meaning(kind)}")
            return None
        if "${" in node.value or node.value == "???":
            return node.value
        if kind in _MEANING:
            return _scalar(node.value, kind, key, problems)
    elif isinstance(node, yaml.MappingNode) and is_dataclass(kind):
        return _section(node, kind, key, problems)
    elif isinstance(node, yaml.MappingNode) and get_origin(kind) is dict:
        return {k.value: typed(v, get_args(kind)[1], f"{key}.{k.value}", problems) for k, v in _pairs(node)}
    elif isinstance(node, yaml.SequenceNode) and get_origin(kind) is list:
        return [typed(item, get_args(kind)[0], f"{key}.{i}", problems) for i, item in enumerate(node.value)]
    if kind in _MEANING or is_dataclass(kind) or get_origin(kind) in (dict, list):
        problems.append(f"{key}: {_shown(node)}, but it needs {_meaning(kind)}")
        return None
    try:
        return _Loader("").construct_object(node, deep=True)
    except yaml.YAMLError as error:
        problems.append(f"{key}: {' '.join(str(error).split())}")
        return None


def kind_at(kind: Any, key: str) -> Any:
    """The type of a dotted key; numbers index lists. Raises ConfigError with the nearest name for an unknown one."""
    parts = key.split(".")
    for i, part in enumerate(parts):
        kind, before = unwrap(kind)[0], ".".join(parts[:i])
        if is_dataclass(kind):
            hints = keys_of(kind)
            if part not in hints:
                raise ConfigError(unknown(f"{before}.{part}".lstrip("."), hints))
            kind = hints[part]
        elif get_origin(kind) is list:
            if not part.isdecimal():
                raise ConfigError(f"{key}: {before} is a list, its items are {before}.0, {before}.1, ...")
            kind = get_args(kind)[0]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif kind is not Any:
            raise ConfigError(f"{key}: {before} has no keys, it is {_meaning(kind)}")
    return kind


def keys_of(kind: Any) -> dict[str, Any]:
    """Names and types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def unknown(key: str, known: Sequence[str] | dict[str, Any]) -> str:
    """The message for a key that does not exist, with the nearest one."""
    before, _, last = key.rpartition(".")
    close = get_close_matches(last, known, 1)
    near = f"did you mean {f'{before}.{close[0]}'.lstrip('.')}?" if close else f"the keys here are: {', '.join(known)}"
    return f"{key}: no such key; {near}"


def unwrap(kind: Any) -> tuple[Any, bool]:
    """(type without None, whether None is a value)."""
    if get_origin(kind) in (Union, types.UnionType) and types.NoneType in get_args(kind):
        inner = [arg for arg in get_args(kind) if arg is not types.NoneType]
        return (inner[0] if len(inner) == 1 else Union[tuple(inner)]), True
    return kind, kind is Any


def _scalar(text: str, kind: type, key: str, problems: list[str]) -> Any:
    try:
        return _BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        problems.append(f"{key}: {text!r} is not {_MEANING[kind]}")
        return None


def _section(node: yaml.MappingNode, kind: Any, key: str, problems: list[str]) -> dict[str, Any]:
    hints = keys_of(kind)
    values = {}
    for name_node, value in _pairs(node):
        name = str(name_node.value)
        full = f"{key}.{name}".lstrip(".")
        if name in hints:
            values[name] = typed(value, hints[name], full, problems)
        else:
            problems.append(unknown(full, hints))
    return values


def _pairs(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    _Loader("").flatten_mapping(node)  # resolves <<
    return list(node.value)


def _shown(node: yaml.Node) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else f"a {node.tag.rpartition(':')[2]}"


def _meaning(kind: Any) -> str:
    if is_dataclass(kind):
        return f"a mapping with the keys {', '.join(keys_of(kind))}"
    if get_origin(kind) in (dict, list):
        return "a mapping" if get_origin(kind) is dict else "a list, such as [a, b]"
    return _MEANING.get(kind, str(kind))
