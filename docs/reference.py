"""What the site is made of besides docs/: references from the code, and the plugins' READMEs. Hooks of mkdocs, see mkdocs.yml."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from omegaconf import MISSING as NEEDED

from rlrun.config.schema import Config
from rlrun.config.values import keys_of, unwrap
from rlrun.hookspecs import KINDS, Hooks, PluginInfo, Step
from rlrun.plugins import Plugins

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

Leaf = tuple[str, Field[Any], Any, Any]
ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.name for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").exists())
README_PAGES = {f"plugins/{name}/README.md": f"plugins/{name}.md" for name in SHIPPED}
"""Files of the repository that are pages of the site, by their place there."""
HOMES = {"README.md": "index.md", "core/README.md": "index.md", **README_PAGES}


def hooks() -> str:
    """The page of the hooks: each with its signature, its documentation, and the shipped plugins that have it."""
    parts = ["# Hooks", "Made from `rlrun/hookspecs.py`. A plugin has those that it needs, each marked `@hookimpl`, and may "
             "leave out parameters that it does not use. See [Write a plugin](../authoring.md)."]
    plugins = Plugins.load(SHIPPED)
    for name, hook in hook_functions().items():
        signature = str(inspect.signature(hook)).replace("(self, ", "(").replace("(self)", "()").replace("'", "")
        having = [plugin for plugin in SHIPPED if name in plugins.hooks(plugin)]
        parts += [f"## {name}", f"```python\ndef {name}{signature}\n```", inspect.getdoc(hook) or "",
                  "Plugins here that have it: " + (", ".join(f"[{p}](../plugins/{p}.md)" for p in having) or "none") + "."]
    parts.append("# What hooks exchange")
    for kind in (PluginInfo, Step):
        parts += [f"## {kind.__name__}", "```python\n" + inspect.getsource(kind).rstrip() + "\n```"]
    return "\n\n".join(parts) + "\n"


def hook_functions() -> dict[str, Any]:
    """The functions of `Hooks`, by name."""
    return {name: hook for name, hook in vars(Hooks).items() if inspect.isfunction(hook) and not name.startswith("_")}


INTERFACES = {
    "Algorithm": ("algorithms/base.py Algorithm", "algorithms/policy_gradient.py PolicyAlgorithm"),
    "Reward": ("rewards/protocol.py Reward", "rewards/protocol.py RewardItem"),
    "Environment": ("environments/protocol.py Environment",),
    "Source": ("data/sources.py Source", "data/sample.py Row"),
    "Tracker": ("trackers/protocol.py Tracker",),
    "Rollout": ("rollout/protocol.py Rollout", "rollout/protocol.py Request", "rollout/protocol.py SamplingParams",
                "rollout/protocol.py Completion"),
    "Backend": ("workers/protocol.py Backend", "workers/protocol.py Worker", "workers/protocol.py RoleSpec",
                "workers/protocol.py RoleRequest", "workers/protocol.py Layout"),
    "Sequence parallelism": ("workers/protocol.py SequenceParallel",),
    "What flows": ("batch.py Batch", "workers/protocol.py Loss", "workers/protocol.py Term", "workers/protocol.py Kind",
                   "metrics.py Value"),
    "Functions of algorithms": ("algorithms/advantages.py", "algorithms/losses.py"),
}
"""What plugins implement or use: files of core, and a class, or all that is public there."""


def interfaces() -> str:
    """The page of what plugins implement: classes without the bodies of their methods, as core's files have them."""
    parts = ["# Interfaces", "Made from core's source, bodies left out. A class that a plugin names under `provides` has the "
             "methods of its kind; it needs no base class, save an algorithm."]
    for title, places in INTERFACES.items():
        parts.append(f"## {title}")
        for path, _, name in (place.partition(" ") for place in places):
            source = (ROOT / "core" / "rlrun" / path).read_text(encoding="utf-8")
            nodes = _outlines(source)
            text = nodes[name] if name else "\n\n".join(text for one, text in nodes.items() if not one.startswith("_"))
            parts += [f"`rlrun.{path[:-3].replace('/', '.')}`", f"```python\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def _outlines(source: str) -> dict[str, str]:
    """Classes, functions and documented names of a module."""
    lines, body = source.splitlines(), ast.parse(source).body
    found = {node.name: "\n".join(_outline(node, lines)) for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node, text in pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(text, ast.Expr):
            found[node.targets[0].id] = "\n".join(lines[node.lineno - 1:text.end_lineno])
    return found


def _outline(node: ast.ClassDef | ast.FunctionDef, lines: list[str]) -> list[str]:
    """A class with its attributes, and its methods as they are called; a function as it is called."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    if isinstance(node, ast.FunctionDef):
        documented = ast.get_docstring(node) is not None
        last = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        return lines[first - 1:last] if documented or last >= node.lineno else lines[first - 1:node.end_lineno]
    found, last = [], first - 1
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name.startswith("_") and child.name not in ("__init__", "__call__"):
            last = child.end_lineno or last
            continue
        begin = min([child.lineno, *(one.lineno for one in getattr(child, "decorator_list", ()))])
        found += lines[last:begin - 1] + (
            _outline(child, lines) if isinstance(child, ast.FunctionDef) else lines[begin - 1:child.end_lineno])
        last = child.end_lineno or last
    return found


def keys() -> str:
    """The page of all keys: core's and those of the shipped plugins; and of the names that they provide."""
    parts = ["# Configuration keys", "Made from the dataclasses of core and of the plugins in this repository. `N` counts the "
             "items of a list, from 0. `rl-run CONFIG --print-config` shows what a run has."]
    sections: dict[str, list[Leaf]] = {}
    for row in leaves(Config):
        sections.setdefault(row[0].partition(".")[0], []).append(row)
    infos = {info.name: info for info in Plugins.load(SHIPPED).infos}
    parts += [part for name, rows in sections.items() for part in (f"## {name}", _table(rows))]
    for name in SHIPPED:
        if config := infos[name].config:
            parts += [f"## {name} (plugin)", f"Of the plugin [{name}](../plugins/{name}.md).", _table(list(leaves(config, name)))]
    provided = [f"| {kind} | {', '.join(f'`{name}`' for name in names)} | {info.name} |"
                for kind in KINDS for info in infos.values() if (names := info.provides.get(kind))]
    parts += ["## Names", "What can be chosen, and which plugin provides it.",
              "\n".join(["| kind | name | plugin |", "|---|---|---|", *provided])]
    return "\n\n".join(parts) + "\n"


def leaves(section: Any, key: str = "") -> Iterator[Leaf]:
    """Keys that hold values: key (`N` for the items of a list), field, type, default. `section`: a dataclass, or one of its
    objects whose values are defaults."""
    hints = keys_of(section if isinstance(section, type) else type(section))
    for field in fields(section):
        full, kind = f"{key}.{field.name}".lstrip("."), unwrap(hints[field.name])[0]
        item = get_args(kind)[0] if get_origin(kind) is list else None
        default = _default(section, field)
        if is_dataclass(kind):
            yield from leaves(kind if default is None else default, full)
        elif is_dataclass(item):
            yield from leaves(item, f"{full}.N")
        else:
            yield full, field, hints[field.name], default


def _default(section: Any, field: Field[Any]) -> Any:
    if not isinstance(section, type):
        return getattr(section, field.name)
    return field.default if field.default is not MISSING else field.default_factory()


def _table(rows: list[Leaf]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field, kind, default in rows:
        cells = (f"`{key}`", f"`{_kind(kind)}`", _shown(default), _meaning(field))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _kind(kind: Any) -> str:
    inner, optional = unwrap(kind)
    name = str(inner).replace("typing.", "") if get_origin(inner) else getattr(inner, "__name__", str(inner))
    return f"{name} or null" if optional and inner is not Any else name


def _shown(value: Any) -> str:
    if value == NEEDED:
        return "must be given"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else repr(value)}`"


def _meaning(field: Field[Any]) -> str:
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    limits = [f"{words[name]} {field.metadata[name]:g}" for name in words if name in field.metadata]
    choices = [", ".join(f"`{choice}`" for choice in field.metadata["choices"])] if field.metadata.get("choices") else []
    return "; ".join([field.metadata.get("help", ""), *choices, *([", ".join(limits)] if limits else [])])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The decisions, in order, end the navigation."""
    assert config.nav is not None
    config.nav.append({"Decisions": [f"decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that are not in docs/."""
    from mkdocs.structure.files import File

    made = {"reference/hooks.md": hooks(), "reference/interfaces.md": interfaces(), "reference/keys.md": keys()}
    for source, page in README_PAGES.items():
        made[page] = (ROOT / source).read_text(encoding="utf-8")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are right in the repository become the site's; what is not on the site becomes its path. A list right below a
    paragraph, which is one on GitHub, becomes one here."""
    sources = {there: source for source, there in README_PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return re.sub(r"^([^-\s|].*\n)(?=- )", r"\1\n", relinked(markdown, source, page.file.src_uri), flags=re.MULTILINE)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    formula = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
    return formula.sub(lambda found: convert(unescape(found[1])), html)


def relinked(markdown: str, source: str, page: str) -> str:
    """The text of the repository's file `source` with links for the site's `page`."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups(default="")
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        there = HOMES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if there:
            return f"[{text}]({os.path.relpath(there, os.path.dirname(page) or '.')}{anchor})"
        return f"`{path}`" if (ROOT / path).exists() else found[0]

    return re.sub(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)", link, markdown)
