"""What holds for the packages of this repository as they are written."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ["core", *(f"plugins/{path.name}" for path in sorted((ROOT / "plugins").iterdir()))]
OFFERED = {"core": {"flash_attn"}}
"""What a package takes where it is there, and is no extra of it."""


def imported(folder: Path) -> set[str]:
    """Top-level modules that code under a folder imports anywhere, without the standard library's."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).split(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package):
    """A package relies on nothing that others happen to install: each import, also of a plugin's tests, is of a distribution
    that its own pyproject.toml names; core's dependencies count for plugins' tests alone."""
    def named(project):
        texts = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        return {canonicalize_name(Requirement(text).name) for part in texts for text in part}

    project, core = (tomllib.loads((ROOT / p / "pyproject.toml").read_text())["project"] for p in (package, "core"))
    dists, own = packages_distributions(), canonicalize_name(project["name"])
    [code] = (path.parent for path in (ROOT / package).glob("rlrun*/__init__.py"))
    for folder, allowed in ((code, named(project)), (ROOT / package / "tests", named(project) | named(core))):
        for module in imported(folder) - OFFERED.get(package, set()):
            providers = {canonicalize_name(dist) for dist in [module, *dists.get(module, [])]}
            assert providers & (allowed | {own}), f"{folder} imports {module}, of {providers}: not in pyproject.toml"


def test_only_memory_empties_the_cache():
    """`rlrun.memory` is the one place that calls torch.cuda.empty_cache, in core, in plugins and in benchmarks."""
    folders = [ROOT / name for name in (*PACKAGES, "benchmarks")]
    sources = [path for folder in folders for path in folder.rglob("*.py") if "tests" not in path.parts]
    assert len(sources) > 100
    assert [p.name for p in sources if "cuda.empty_cache" in p.read_text()] == ["memory.py"]
