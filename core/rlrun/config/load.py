"""From a YAML file and overrides to a checked configuration: plugin list, schema, values, validation, in this order."""

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlrun.config.schema import Config
from rlrun.config.validate import validate
from rlrun.config.values import NULL, compose, keys_of, kind_at, override_node, typed, unwrap
from rlrun.discovery import installed, name_of
from rlrun.errors import ConfigError, PluginError
from rlrun.plugins import Plugins, Recipe


def load_config(path: str | Path, overrides: Sequence[str] = (), add: Sequence[str] = (),
                without: Sequence[str] = ()) -> tuple[Config, Plugins]:
    """Read, override and validate a configuration, and load its plugins.

    `overrides` are "key=value" each: text keys take the value as it is, others parse it as YAML; a number in a key indexes an
    existing list; a list replaces the list, a mapping is merged. `add` names plugins (or files, ./NAME.py) to append to the
    list, `without` those to take from it, with their sections. Raises ConfigError with all that is wrong, and PluginError."""
    try:
        root = compose(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from error
    if isinstance(root, yaml.ScalarNode) and root.tag == NULL:
        root = yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values")
    pairs = [_split(text) for text in overrides]
    names = _plugin_list(root, pairs, add, without)
    plugins = Plugins.load(names)
    dropped = {name_of(name) for name in without}
    root.value = [(key, value) for key, value in root.value if key.value not in dropped]
    pairs = [(key, value) for key, value in pairs if key.split(".")[0] not in {"plugins", *dropped}]
    config = build(plugins, root, pairs, names)
    validate(config, plugins)
    return config, plugins


def build(plugins: Plugins, root: yaml.MappingNode, overrides: Sequence[tuple[str, str]], names: list[str]) -> Config:
    """Put values into the schema of these plugins. Raises ConfigError; nothing is validated across keys yet."""
    cls, problems = schema(plugins), list[str]()
    data = typed(root, cls, "", problems)
    try:
        if problems:
            raise ConfigError("\n".join(_with_plugin_hint(problem, cls) for problem in problems))
        values = OmegaConf.merge(_defaults(cls), {**data, "plugins": names})  # type: ignore[arg-type]  # hashes the class
        assert isinstance(values, DictConfig)
        for key, text in overrides:
            _apply(values, cls, key, text, problems)
        if problems:
            raise ConfigError("\n".join(problems))
        _preset(values, cls, data, overrides, plugins.presets)
        if missing := sorted(OmegaConf.missing_keys(values)):
            raise ConfigError(f"these keys need a value: {', '.join(missing)}", f"add them, or {missing[0]}=...")
        return cls(**{name: _section_object(values, name) for name in keys_of(cls)})
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error


def schema(plugins: Plugins) -> type[Config]:
    """Config with the sections of plugins. Its objects pickle with their plugins: any process can rebuild them."""
    sections = tuple((info.name, info.config) for info in plugins.infos if info.config is not None)
    return _schema(plugins.recipe, sections)


@cache
def _schema(recipe: Recipe, sections: tuple[tuple[str, type], ...]) -> type[Config]:
    for name, config in sections:
        try:
            OmegaConf.structured(config)
        except Exception as error:
            raise PluginError(f"plugin {name!r}: OmegaConf cannot read {config.__name__}: {error}") from error
    if not sections:
        return Config

    def reduce(self: Config) -> tuple[Any, ...]:
        return _rebuild, (Plugins.from_recipe(recipe), dict(vars(self)))

    made = [(name, config, field(default_factory=config)) for name, config in sections]
    return make_dataclass("Config", made, bases=(Config,), namespace={"__reduce__": reduce})


@cache
def _defaults(cls: Any) -> DictConfig:
    """All defaults, typed. Slow to build; merging copies it."""
    defaults = OmegaConf.structured(cls)
    assert isinstance(defaults, DictConfig)
    return defaults


def to_yaml(config: Config) -> str:
    """YAML that loads back to the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config))))


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.[^\s.]+)*", key):
        hint = {"+": "write key=value: keys that exist need no +", "~": "to take a plugin out: --no-plugin NAME"}
        raise ConfigError(f"{text!r} is not of the form key=value", hint.get(text[:1]))
    return key, value


def _plugin_list(root: yaml.MappingNode, overrides: Sequence[tuple[str, str]], add: Sequence[str],
                 without: Sequence[str]) -> list[str]:
    problems: list[str] = []
    kind = keys_of(Config)["plugins"]
    nodes = [value for key, value in root.value if key.value == "plugins"]
    for key, text in overrides:
        if key.startswith("plugins."):
            raise ConfigError(f"{key}: give the whole list, plugins=[a, b]")
        if key == "plugins":
            nodes.append(override_node(text, kind, key))
    given = typed(nodes[-1], kind, "plugins", problems) if nodes else []
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        names = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"plugins: {_first_line(error)}") from error
    assert isinstance(names, list)
    names = list(dict.fromkeys([*map(str, names), *add]))
    for name in without:
        gone = [item for item in names if name_of(item) == name_of(name)]
        if not gone:
            raise ConfigError(f"--no-plugin {name}: it is not in the list: {', '.join(names) or 'empty'}")
        names = [item for item in names if item not in gone]
        print(f"rl-run: plugin {name!r} and its section are left out", file=sys.stderr)
    return names


def _apply(values: DictConfig, cls: type[Config], key: str, text: str, problems: list[str]) -> None:
    """One override. Lists are indexed as far as they go; an optional section that is null gets its defaults first."""
    try:
        kind = kind_at(cls, key)
    except ConfigError as error:
        problems.append(_with_plugin_hint(str(error), cls))
        return
    parts, at = key.split("."), ""
    for part, after in itertools.pairwise(parts):
        at = f"{at}.{part}".lstrip(".")
        value = OmegaConf.select(values, at)
        if value is None and is_dataclass(unwrap(kind_at(cls, at))[0]):
            OmegaConf.update(values, at, {})
        elif OmegaConf.is_list(value) and int(after) >= len(value):
            problems.append(f"{key}: {at} has {len(value)} items, numbered from 0")
            return
    before = len(problems)
    value = typed(override_node(text, kind, key), kind, key, problems)
    if len(problems) == before:
        OmegaConf.update(values, key, value, merge=value != {} or is_dataclass(unwrap(kind)[0]))  # {} empties an open mapping


def _preset(values: DictConfig, cls: type[Config], data: dict[str, Any], overrides: Sequence[tuple[str, str]],
            presets: Mapping[str, Mapping[str, object]]) -> None:
    """Give each stage's algorithm the fields of its name's preset, but for those that file or overrides set."""
    given = OmegaConf.create(data)
    for key, text in overrides:
        if re.fullmatch(r"stages(\.\d+(\.algorithm(\..+)?)?)?", key):
            _apply(given, cls, key, text, [])
    for i, stage in enumerate(values.stages):
        own = OmegaConf.select(given, f"stages.{i}.algorithm") or {}
        for name, value in presets.get(stage.algorithm.name, {}).items():
            if name not in own:
                stage.algorithm[name] = value


def _section_object(values: DictConfig, name: str) -> Any:
    """One section as its dataclass, whose own checks (`__post_init__`) may refuse it."""
    try:
        return OmegaConf.to_object(values[name])
    except OmegaConfBaseException:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _with_plugin_hint(problem: str, cls: type[Config]) -> str:
    name = problem.partition(":")[0].split(".")[0]
    if name not in keys_of(cls) and name in installed():
        return f"{problem.partition(';')[0]}; plugin {name!r} is installed but not listed: add -p {name}"
    return problem


def _first_line(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{key}: {line}" if key else line


def _rebuild(plugins: Plugins, values: dict[str, Any]) -> Config:
    return schema(plugins)(**values)


def _plain(value: Any) -> Any:
    """Dicts, lists and scalars; text that OmegaConf would read as an interpolation or a missing value escaped."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | Path):
        value = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", str(value))
        return "\\" + value if re.fullmatch(r"\\*\?\?\?", value) else value
    return value
