"""The plugins of a run, in order, and the only place from which hooks are called."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from rlrun.config.schema import Config
from rlrun.discovery import Found, find, incompatible, installed, name_of, read
from rlrun.errors import ConfigError, PluginError
from rlrun.hookspecs import KINDS, Hooks, PluginInfo, Step

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from rlrun.workers.protocol import Layout, RoleSpec, SequenceParallel, Worker

Recipe = tuple[tuple[str, "bytes | None"], ...]
"""The plugin list with the text of those that are files: what another process needs to load the same plugins."""


class Plugins:
    """The plugins of a run, `builtin` first, then in the order of the user's list.

    Pickles as its recipe: the receiving process loads the same list once, and refuses to go on where a name, version or
    file differs from the sender's."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        available = installed()
        self._found: dict[str, Found] = {}
        for item, source in (("builtin", None), *recipe):
            if name_of(item) in self._found:
                raise PluginError(f"plugin {name_of(item)!r} is listed twice", "builtin is always loaded")
            self._found[name_of(item)] = find(item, source, available)
        self._manager = _registered(list(self._found.values()))
        self._provided = _provided(list(self._found.values()))

    @classmethod
    def load(cls, names: Sequence[str]) -> Plugins:
        """Load the plugins of a list of names and files. Raises PluginError, which names plugin, cause and fix."""
        recipe = tuple((item, read(item)) for item in names)
        plugins = _loaded[recipe] = cls(recipe)
        return plugins

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Plugins:
        """The same plugins in another process; each process loads a recipe once."""
        if recipe not in _loaded:
            _loaded[recipe] = cls(recipe)
        return _loaded[recipe]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.recipe, self.manifest())

    @property
    def infos(self) -> list[PluginInfo]:
        """Descriptors, in order."""
        return [found.info for found in self._found.values()]

    @property
    def names(self) -> list[str]:
        """Names, in order."""
        return list(self._found)

    def provided(self, kind: str) -> dict[str, str]:
        """What can be chosen of a kind: name -> "package.module:Class"."""
        return {name: target for name, (_, target) in self._provided[kind].items()}

    @property
    def presets(self) -> dict[str, Mapping[str, object]]:
        """What the names of algorithms set in a stage's options."""
        return {name: preset for info in self.infos for name, preset in info.presets.items()}

    def files(self) -> list[tuple[str, str]]:
        """The plugins that are files: the module each one becomes, and its path on the driver."""
        return [(f.module, str(f.path)) for f in self._found.values() if f.source is not None]

    def provider(self, kind: str, name: str) -> str:
        """Name of the plugin that provides something. Raises ConfigError where none does."""
        choices = self._provided[kind]
        if name not in choices:
            close = get_close_matches(str(name), choices, 1)
            unlisted = sorted(set(installed()) - set(self._found))
            hint = f"did you mean {close[0]!r}?" if close else None
            if name in unlisted:
                hint = f"plugin {name!r} is installed but not listed: add -p {name}"
            elif unlisted and not close:
                hint = f"installed but not listed: {', '.join(unlisted)} (see rl-run plugins --inspect)"
            raise ConfigError(f"no {kind} {name!r}; there is: {', '.join(sorted(choices)) or 'none'}", hint)
        return choices[name][0].name

    def resolve(self, kind: str, name: str) -> type[Any]:
        """Import the class behind a name. Raises ConfigError for unknown names, PluginError where the import fails."""
        found = self._found[self.provider(kind, name)]
        target = self.provided(kind)[name]
        module, _, attribute = target.partition(":")
        try:
            resolved = attrgetter(attribute)(import_module(module))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise PluginError(f"{found} provides {kind} {name!r}, but {target} cannot be imported: {cause}") from error
        if not isinstance(resolved, type):
            raise PluginError(f"{found} provides {kind} {name!r}, but {target} is not a class")
        return resolved

    def layout(self, config: Config) -> Layout:
        """How the ranks that train share the work, as the backend says. Raises ValueError where they cannot."""
        declared = {info.name: info.sequence_parallel(config) for info in self.infos if info.sequence_parallel}
        sizes = {name: size for name, size in declared.items() if size > 1}
        if len(sizes) > 1:
            both = " and ".join(f"{name} ({size})" for name, size in sizes.items())
            raise ConfigError(f"more than one plugin wants to spread sequences over ranks: {both}", "set all but one to 1")
        backend = self.resolve("backend", config.actor.backend)
        name, sp = next(iter(sizes.items()), ("", 1))
        try:
            return backend.layout(config, config.resources.train_ranks, sp)
        except ValueError as error:
            if not name:
                raise
            raise ConfigError(str(error), f"plugin {name!r} asks for {sp} ranks a sequence") from error

    def make_worker(self, spec: RoleSpec, layout: Layout) -> Worker:
        """Build this rank's part of a role's model, by the plugin that provides the backend."""
        provider = self.provider("backend", spec.backend)
        worker: Worker | None = self._call("make_worker", provider, spec=spec, layout=layout)
        if worker is None:
            raise PluginError(f"{self._found[provider]}: make_worker is missing or returned None for {spec.role!r}")
        return worker

    def patch_attention(self, model: nn.Module, spec: RoleSpec, mesh: DeviceMesh) -> SequenceParallel | None:
        """The one plugin's answer that spans sequences over ranks, or None where no plugin does."""
        answers = {name: self._call("patch_attention", name, model=model, spec=spec, mesh=mesh) for name in self.names}
        given = {name: answer for name, answer in answers.items() if answer is not None}
        if len(given) > 1:
            both = " and ".join(str(self._found[name]) for name in given)
            raise PluginError(f"hook patch_attention was answered by {both}", "list only one of them")
        return next(iter(given.values()), None)

    def save_checkpoint(self, worker: Worker, directory: Path, contents: Sequence[str]) -> Callable[[], None] | None:
        """Write a worker's state, by the plugin that made it, or copy it: what is returned then writes."""
        return self._checkpoint("save_checkpoint", worker, directory, contents)

    def load_checkpoint(self, worker: Worker, directory: Path, contents: Sequence[str]) -> None:
        """Restore a worker's state, by the plugin that made it."""
        self._checkpoint("load_checkpoint", worker, directory, contents)

    def compute_metrics(self, step: Step) -> dict[str, float]:
        """All plugins' further metrics of a step. A key must begin with its plugin's name and "/"."""
        metrics: dict[str, float] = {}
        for name, found in self._found.items():
            if not self._implements(name, "compute_metrics"):
                continue
            answer = self._call("compute_metrics", name, step=step)
            if not isinstance(answer, Mapping):
                raise PluginError(f"{found}: compute_metrics returned {answer!r}, not a dict")
            for key, value in answer.items():
                if not isinstance(key, str) or not key.startswith(f"{name}/") or key in step.metrics:
                    raise PluginError(f"{found}: compute_metrics key {key!r} must be new and begin with '{name}/'")
                if not isinstance(value, numbers.Real) or isinstance(value, bool):
                    raise PluginError(f"{found}: compute_metrics value of {key!r} is {value!r}, not a float")
                metrics[key] = float(value)
        return metrics

    def manifest(self) -> list[dict[str, Any]]:
        """Names, versions and hashes in order, as JSON-able data: recorded with a run, compared between processes."""
        return [{"name": f.name, "dist": f.dist, "version": f.version, "api_version": f.info.api_version, "sha256": f.sha256,
                 "path": f.path} for f in self._found.values()]

    def check_same(self, other: Sequence[Mapping[str, Any]]) -> None:
        """Compare with another process's manifest; the path of a file may differ. Raises PluginError."""
        here, there = ([{k: v for k, v in one.items() if k != "path"} for one in m] for m in (self.manifest(), other))
        for i in range(max(len(here), len(there))):
            ours, theirs = (side[i] if i < len(side) else None for side in (here, there))
            if ours != theirs:
                raise PluginError(f"plugin {i} of the list differs between processes: here {ours}, there {theirs}",
                                  "install the same distributions on every machine")

    def copy_files_to(self, directory: Path) -> None:
        """Keep the plugins that are files with a run, as NAME.py."""
        for found in self._found.values():
            if found.source is not None:
                (directory / f"{found.name}.py").write_bytes(found.source)

    def hooks(self, name: str) -> list[str]:
        """The hooks that a plugin implements."""
        return sorted(hook.name for hook in self._manager.get_hookcallers(self._found[name].plugin) or ())

    def _implements(self, name: str, hook: str) -> bool:
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        return any(i.plugin is self._found[name].plugin and not _wraps(i) for i in impls)

    def _checkpoint(self, hook: str, worker: Worker, directory: Path, contents: Sequence[str]) -> Any:
        provider = self.provider("backend", worker.spec.backend)
        if not self._implements(provider, hook):
            raise PluginError(f"{self._found[provider]} has no {hook}")
        return self._call(hook, provider, worker=worker, directory=directory, contents=contents)

    def _call(self, hook: str, name: str, **arguments: Any) -> Any:
        """Call a hook on one plugin, inside the wrappers of all. None where the plugin does not implement it."""
        target = self._found[name].plugin
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        others = [impl.plugin for impl in impls if impl.plugin is not target and not _wraps(impl)]
        try:
            results = self._manager.subset_hook_caller(hook, others)(**arguments)
        except Exception as error:
            error.add_note(f"raised in hook {hook} of {self._found[name]}")
            raise
        return results[0] if results else None


_loaded: dict[Recipe, Plugins] = {}


def _rebuild(recipe: Recipe, manifest: list[dict[str, Any]]) -> Plugins:
    plugins = Plugins.from_recipe(recipe)
    plugins.check_same(manifest)
    return plugins


def _wraps(impl: pluggy.HookImpl) -> bool:
    return bool(impl.wrapper or impl.hookwrapper)


def _registered(found: list[Found]) -> pluggy.PluginManager:
    """A manager whose hooks run in the order of `found`: pluggy calls the last registered first."""
    manager = pluggy.PluginManager("rlrun")
    manager.add_hookspecs(Hooks)
    by_plugin = {id(one.plugin): one for one in found}
    try:
        for one in reversed(found):
            manager.register(one.plugin, one.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        hooks = ", ".join(name for name in vars(Hooks) if not name.startswith("_"))
        raise PluginError(f"{by_plugin[id(error.plugin)]}: {error}", f"the hooks are: {hooks}") from error
    for one in found:
        _check_implementations(one, manager)
    return manager


def _check_implementations(one: Found, manager: pluggy.PluginManager) -> None:
    """Refuse what pluggy takes in silence: parameters that would never be filled, and another order than the list's."""
    for hook in manager.get_hookcallers(one.plugin) or ():
        impls = [impl for impl in hook.get_hookimpls() if impl.plugin is one.plugin]
        for impl in impls:
            names = hook.spec.argnames if hook.spec else ()
            for parameter in inspect.signature(impl.function).parameters.values():
                if parameter.name not in names or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                    raise PluginError(f"{one}: hook {hook.name} would never receive parameter '{parameter}'",
                                      f"its parameters are: {', '.join(names)}")
            if impl.tryfirst or impl.trylast:
                raise PluginError(f"{one}: hook {hook.name} asks for tryfirst or trylast: order is the user's list")
        if sum(not _wraps(impl) for impl in impls) > 1:
            raise PluginError(f"{one} implements hook {hook.name} more than once")


def _provided(found: list[Found]) -> dict[str, dict[str, tuple[Found, str]]]:
    """kind -> name -> (plugin, "package.module:Class"). Raises PluginError on conflicts."""
    core = {field.name for field in fields(Config)}
    provided: dict[str, dict[str, tuple[Found, str]]] = {kind: {} for kind in KINDS}
    for one in found:
        if one.name in core:
            raise PluginError(f"{one} has the name of a core section of the configuration; those are: {sorted(core)}")
        if strange := set(one.info.presets) - set(one.info.provides.get("algorithm", ())):
            raise PluginError(f"{one} has presets of {', '.join(sorted(strange))}, which it does not provide")
        for kind, names in one.info.provides.items():
            if kind not in KINDS:
                raise PluginError(f"{one} provides a {kind!r}; the kinds are: {', '.join(KINDS)}")
            for name, target in names.items():
                if not re.fullmatch(r"[\w.]+:[\w.]+", target):
                    raise PluginError(f"{one}: {kind} {name!r} is {target!r}, not 'package.module:Class'")
                if name in provided[kind]:
                    raise PluginError(f"{kind} {name!r} is provided by {provided[kind][name][0]} and {one}",
                                      "take one of the two from the list")
                module, _, attribute = target.partition(":")
                itself = one.source is not None and module == one.name  # a plugin in one file, imported under another name
                provided[kind][name] = (one, f"{one.module}:{attribute}" if itself else target)
    return provided


def discover(plugins: Plugins, load: bool = False) -> list[dict[str, Any]]:
    """All plugins there are, for `rl-run plugins`: loaded ones in order, then installed ones by name.

    `state` is builtin, listed, installed, incompatible or broken. What an installed plugin provides is known only with
    `load`, which imports it."""
    rows = [_row(plugins, name, "builtin" if name == "builtin" else "listed") for name in plugins.names]
    for name, entry_points in sorted(installed().items()):
        if name in plugins.names:
            continue
        for entry_point in entry_points:
            dist = entry_point.dist
            problem = incompatible(entry_point)
            row = {"name": name, "dist": dist.name if dist else None, "version": dist.version if dist else None,
                   "state": "incompatible" if problem else "installed", "problem": problem}
            if load and not problem:
                try:
                    row = _row(Plugins(((name, None),)), name, "installed")
                except PluginError as error:
                    row.update(state="broken", problem=str(error))
            rows.append(row)
    return rows


def _row(plugins: Plugins, name: str, state: str) -> dict[str, Any]:
    found = plugins._found[name]
    provides = {kind: sorted(names) for kind, names in found.info.provides.items()}
    return {"name": name, "dist": found.dist, "version": found.version, "path": found.path, "state": state,
            "hooks": plugins.hooks(name), "provides": provides}
