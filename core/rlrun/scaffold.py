"""`rl-run new-plugin`: a package to begin with, from the templates in templates/plugin."""

import keyword
import re
from dataclasses import fields
from pathlib import Path
from string import Template

from rlrun import __version__
from rlrun.config.schema import Config
from rlrun.errors import ConfigError
from rlrun.plugins import Plugins

TEMPLATES = Path(__file__).parent / "templates" / "plugin"
KINDS = {"algorithm": "stages.0.algorithm.name={}", "backend": "actor.backend={}", "reward": "reward.kind={}",
         "rollout": "rollout.engine={}", "tracker": "trainer.trackers=[console,{}]"}
"""Kinds that there are templates of, and what chooses one in a configuration."""


def new_plugin(name: str, kind: str, parent: Path) -> Path:
    """Write the package rlrun-NAME into a folder of that name in `parent`. Raises ConfigError for a name that cannot be or is
    taken, for a kind without templates, and for a folder that is there already."""
    plain = name.replace("-", "_")
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind}: the kinds are {', '.join(KINDS)}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", plain) or keyword.iskeyword(plain):
        raise ConfigError(f"{name!r} is no name for a plugin", "lower-case letters, digits and - between them: short-answers")
    if plain in {"builtin", *(field.name for field in fields(Config)), *Plugins.load([]).provided(kind)}:
        raise ConfigError(f"{name!r} is a section of the configuration, or {kind} of rlrun, already", "take another name")
    folder = parent / f"rlrun-{plain.replace('_', '-')}"
    if folder.exists():
        raise ConfigError(f"{folder} is there already", "take another name, or move it away")
    package, needs = f"rlrun_{plain}", ["rlrun", "rlrun-fsdp"] if kind == "backend" else ["rlrun"]
    listed, minor = [*(["fsdp"] if kind == "backend" else []), plain], ".".join(__version__.split(".")[:2])
    algorithm = kind == "algorithm"
    values = {
        "name": plain, "dist": folder.name, "package": package, "kind": kind, "use": KINDS[kind].format(plain),
        "Class": "".join(map(str.capitalize, plain.split("_"))), "article": "an" if algorithm else "a",
        "list": ",".join(listed), "quoted": ", ".join(f'"{item}"' for item in listed),
        "needs": ", ".join(f'"{dist}~={minor}.0"' for dist in needs),
        "presets": f',\n                      presets={{"{plain}": {{"advantage": "grpo"}}}}' if algorithm else "",
        "keys": '\n    scale: float = opt(1.0, "factor of all advantages", gt=0)' if algorithm else ""}
    files = {
        "pyproject.toml": "pyproject.toml", "README.md": "README.md", ".github/workflows/test.yml": "test.yml",
        f"{package}/plugin.py": "plugin_backend.py" if kind == "backend" else "plugin.py", f"{package}/{kind}.py": f"{kind}.py",
        f"tests/test_{plain}.py": "test.py", f"tests/test_{kind}_contract.py": f"test_{kind}.py"}
    for path, template in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(Template((TEMPLATES / f"{template}.tmpl").read_text()).substitute(values))
    (folder / package / "__init__.py").touch()
    return folder
