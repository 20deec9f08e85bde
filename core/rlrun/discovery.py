"""Find one plugin, check it against this version of rlrun, and import it.

Installed plugins are entry points of group `rlrun.plugins`; `./NAME.py` is a plugin in one file. Metadata is read for
all of them, code only of those asked for."""

import hashlib
import importlib.abc
import importlib.util
import inspect
import sys
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import rlrun
from rlrun.errors import PluginError
from rlrun.hookspecs import API_VERSION, PluginInfo

GROUP = "rlrun.plugins"


@dataclass(eq=False)
class Found:
    """A plugin of the list; `plugin` and `info` are known once it was imported and answered `plugin_info`."""

    name: str
    dist: str | None = None
    version: str | None = None
    path: str | None = None
    source: bytes | None = None  # text of a plugin in one file; it travels to ranks, which may run on other machines
    plugin: Any = field(init=False)
    info: PluginInfo = field(init=False)

    def __str__(self) -> str:
        """How messages name it."""
        where = self.path or (self.dist and f"{self.dist} {self.version}")
        return f"plugin {self.name!r} ({where})" if where else f"plugin {self.name!r}"

    @property
    def sha256(self) -> str | None:
        return None if self.source is None else hashlib.sha256(self.source).hexdigest()

    @property
    def module(self) -> str:
        """The module that a file becomes: the same in every process, so that pickles of its classes resolve."""
        return f"rlrun_file_{self.name}_{str(self.sha256)[:12]}"


def is_file(item: str) -> bool:
    """Whether an item of the plugin list means a file rather than an installed plugin."""
    return item.endswith(".py")


def name_of(item: str) -> str:
    """The plugin's name: the item of the plugin list itself, or the file's stem."""
    return Path(item).stem if is_file(item) else item


def installed() -> dict[str, list[EntryPoint]]:
    """Entry points by plugin name; more than one where several distributions use a name. Imports nothing."""
    found: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=GROUP):
        found.setdefault(entry_point.name, []).append(entry_point)
    return found


def incompatible(entry_point: EntryPoint) -> str | None:
    """Why the plugin's distribution cannot work with this rlrun, from its metadata."""
    try:
        requirements = [Requirement(text) for text in (entry_point.dist.requires if entry_point.dist else None) or ()]
    except InvalidRequirement as error:
        return f"its metadata is not valid: {error}"
    for requirement in requirements:
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        fits = requirement.specifier.contains(rlrun.__version__, prereleases=True)
        if canonicalize_name(requirement.name) == "rlrun" and applies and not fits:
            return f"it requires rlrun{requirement.specifier}, this is rlrun {rlrun.__version__}"
    return None


def find(item: str, source: bytes | None, available: dict[str, list[EntryPoint]]) -> Found:
    """Import one item of the plugin list; `source` is the text of a plugin in one file. Raises PluginError."""
    if source is not None:
        found = Found(name_of(item), path=item, source=source)
        found.plugin = _import_file(found)
        return _checked(found)
    candidates = available.get(item, [])
    if not candidates:
        names = ", ".join(sorted(set(available) - {"builtin"})) or "none"
        close = get_close_matches(item.replace("-", "_"), available, 1)
        hint = (f"did you mean {close[0]}?" if close else
                f"pip install rlrun-{item}, or correct the name; a plugin in a file is given as ./{item}.py")
        raise PluginError(f"plugin {item!r} is not installed; installed plugins: {names}", hint)
    if len(candidates) > 1:
        dists = " and ".join(f"{e.dist.name} {e.dist.version}" if e.dist else e.value for e in candidates)
        raise PluginError(f"plugin {item!r} is installed by {dists}", "uninstall all of them but one")
    entry_point = candidates[0]
    found = Found(item, entry_point.dist.name, entry_point.dist.version) if entry_point.dist else Found(item)
    if problem := incompatible(entry_point):
        raise PluginError(f"{found} is incompatible: {problem}", f"pip install --upgrade rlrun {found.dist}")
    try:
        found.plugin = entry_point.load()
    except Exception as error:
        raise _broken(found, f"importing {entry_point.value} raises", error) from error
    return _checked(found)


def read(item: str) -> bytes | None:
    """The text of a plugin in one file; None for an installed plugin. Raises PluginError where it cannot be read."""
    if not is_file(item):
        return None
    try:
        return Path(item).read_bytes()
    except OSError as error:
        raise PluginError(f"plugin file {item!r} cannot be read: {error.strerror}") from error


class _TextLoader(importlib.abc.InspectLoader):
    """Imports a module from its text, which ranks on other machines have only in memory."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.source)

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.source, self.path)


def _import_file(found: Found) -> ModuleType:
    assert found.path is not None
    assert found.source is not None
    if found.module in sys.modules:
        return sys.modules[found.module]
    loader = _TextLoader(found.path, found.source)
    spec = importlib.util.spec_from_loader(found.module, loader, origin=found.path)
    assert spec is not None
    module = sys.modules[found.module] = importlib.util.module_from_spec(spec)
    module.__file__ = found.path
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[found.module]
        raise _broken(found, "running it raises", error) from error
    return module


def _broken(found: Found, what: str, error: Exception) -> PluginError:
    hint = "install what it needs, or take it from the list; --debug shows the traceback"
    return PluginError(f"{found} is broken: {what} {type(error).__name__}: {error}", hint)


def _checked(found: Found) -> Found:
    """Ask a plugin for its descriptor. A manager without specifications is asked: those of another API may differ."""
    if inspect.isclass(found.plugin):
        raise PluginError(f"{found} is a class: the entry point must name a module or an instance")
    probe = pluggy.PluginManager("rlrun")
    probe.register(found.plugin)
    if not hasattr(probe.hook, "plugin_info"):
        raise PluginError(f"{found} has no plugin_info()", "mark it with @rlrun.hookspecs.hookimpl")
    try:
        (info,) = probe.hook.plugin_info() or [None]
    except Exception as error:
        raise _broken(found, "plugin_info() raises", error) from error
    if not isinstance(info, PluginInfo):
        raise PluginError(f"{found}: plugin_info() returned {info!r}, not a PluginInfo")
    if info.api_version != API_VERSION:
        fix = f"install a {found.dist or found.name} for rlrun {rlrun.__version__}"
        raise PluginError(f"{found} is written for plugin API {info.api_version}, this rlrun has {API_VERSION}", fix)
    if info.name != found.name:
        raise PluginError(f"{found} calls itself {info.name!r} in plugin_info(): the two names must be the same")
    if not found.name.isidentifier():
        raise PluginError(f"{found}: a plugin's name must be letters, digits and _: it is also a config section")
    if info.config is not None and not (isinstance(info.config, type) and is_dataclass(info.config)):
        raise PluginError(f"{found}: PluginInfo.config must be a dataclass, not {info.config!r}")
    found.info = info
    return found
