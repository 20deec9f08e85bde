"""Plugins that are installed for one test: a real distribution folder, no build and no network."""

from __future__ import annotations

from itertools import count
from pathlib import Path

_modules = count()


def install(
    directory: Path, name: str, code: str, *, version: str = "1.0", requires: str = "rlrun~=0.1.0",
    dist: str | None = None, attribute: str = "",
) -> str:
    """Write a distribution with one plugin module into `directory`, which must be on sys.path.

    `code` may use MODULE for the module's own name, which is new in each call, and is returned. `attribute` makes the
    entry point name an object in the module.
    """
    dist = dist or f"rlrun-{name}"
    module = f"installed_{name}_{next(_modules)}"
    info = directory / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n{needs}")
    target = f"{module}:{attribute}" if attribute else module
    (info / "entry_points.txt").write_text(f"[rlrun.plugins]\n{name} = {target}\n")
    (directory / f"{module}.py").write_text(code.replace("MODULE", module))
    return module
