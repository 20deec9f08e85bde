"""The site: references are whole, and what pages name is there."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml
from omegaconf import OmegaConf

from rlrun.config.load import load_config, schema
from rlrun.config.schema import Config
from rlrun.config.values import compose, kind_at, typed
from rlrun.errors import ConfigError
from rlrun.folder import flat
from rlrun.plugins import Plugins
from rlrun.rewards.function import load_file
from rlrun.rewards.protocol import RewardItem
from rlrun.testing.recording import leaf_keys

ROOT = Path(__file__).parents[1]
reference: Any = load_file("docs_reference", str(ROOT / "docs" / "reference.py"))
PAGES = sorted([ROOT / "README.md", *ROOT.glob("plugins/*/README.md"), *(
    page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "decisions")])


@cache
def everything() -> type[Config]:
    """The schema with the sections of all shipped plugins."""
    return schema(Plugins.load(reference.SHIPPED))


def test_every_key_is_in_the_reference():
    text = reference.keys()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \| ([^|]+) \|$", text, re.MULTILINE))
    assert {key.replace(".N", "") for key in rows} == leaf_keys(everything())
    assert not [key for key, meaning in rows.items() if not meaning.strip(" ;")]


def test_defaults_in_the_reference():
    """They are those of a configuration that says nothing, also where a section has defaults of its own."""
    text, made = reference.keys(), OmegaConf.structured(everything())
    defaults = dict(re.findall(r"^\| `([\w.]+)` \| [^|]* (?:\\\|[^|]*)?\| (.+?) \| ", text, re.MULTILINE))
    for key in ("prime.optim.clip_grad", "prime.optim.weight_decay", "actor.optim.clip_grad", "rollout.samples_per_prompt",
                "fsdp.lora.target_modules", "checkpoint.keep", "resources.device", "model.gradient_checkpointing", "ref.path"):
        value = yaml.safe_load(defaults[key].strip("`"))
        assert value == OmegaConf.select(made, key), key
    assert defaults["model.path"] == "must be given"


def test_every_hook_is_in_the_reference_and_used(model, tmp_path):
    """Each has documentation, a plugin in this repository beside core's own that has it, and is called on such a plugin in a run
    of a step and one that goes on from it."""
    text = reference.hooks()
    plugins = Plugins.load(reference.SHIPPED)
    called = {("plugin_info", info.name) for info in plugins.infos if info.name in reference.SHIPPED}
    for steps in (1, 2):
        path = runs.write_run(tmp_path, model, runs.grpo(steps, name="prime"), plugins=["fsdp", "ulysses", "prime"],
                              checkpoint={"every": 1}, prime={"accuracy_range": [0.0, 1.0], "drop_truncated": False})
        called |= hooks_called(path)
    hooks = reference.hook_functions()
    assert len(hooks) >= 6
    for name, hook in hooks.items():
        assert len(hook.__doc__ or "") > 40, name
        section = re.search(rf"^## {name}\n(.*?)^##? ", text, re.MULTILINE | re.DOTALL)
        assert section, name
        assert f"def {name}(" in section[1]
        assert hook.__doc__.split("\n")[0] in section[1]
        having = [plugin for plugin in reference.SHIPPED if name in plugins.hooks(plugin)]
        assert having, f"no plugin here has {name}"
        assert all(f"plugins/{plugin}.md" in section[1] for plugin in having)
        assert called & {(name, plugin) for plugin in having}, f"no run calls {name}"


def hooks_called(path: Path) -> set[tuple[str, str]]:
    """(hook, plugin) of all calls in a run."""
    from rlrun import launch
    from rlrun.testing.ranks import share_gloo_thread

    share_gloo_thread()
    called: set[tuple[str, str]] = set()
    config, plugins = load_config(path)
    undo = plugins._manager.add_hookcall_monitoring(
        lambda name, impls, arguments: called.update((name, impl.plugin_name) for impl in impls), lambda *after: None)
    try:
        assert launch.run(config, plugins, "auto") == 0
    finally:
        undo()
    return called


@pytest.mark.parametrize("kind", ["algorithms.base:Algorithm", "rewards.protocol:Reward", "environments.protocol:Environment",
                                  "data.sources:Source", "trackers.protocol:Tracker", "rollout.protocol:Rollout",
                                  "workers.protocol:Worker", "workers.protocol:Backend", "workers.protocol:SequenceParallel"])
def test_interfaces(kind):
    """What a plugin implements is on the page of interfaces: every method, with what its documentation begins with."""
    module, _, name = kind.partition(":")
    cls = getattr(importlib.import_module(f"rlrun.{module}"), name)
    section = re.search(rf"^class {name}\b.*?^```$", reference.interfaces(), re.MULTILINE | re.DOTALL)[0]
    methods = {k: getattr(v, "fget", None) or getattr(v, "__func__", v) for k, v in vars(cls).items()
               if isinstance(v, property | staticmethod) or inspect.isfunction(v)}
    public = {k: v for k, v in methods.items() if not k.startswith("_") or k == "__call__"}
    assert public
    for method, function in public.items():
        assert f"    def {method}(" in section
        assert (function.__doc__ or "").split("\n")[0] in section
    assert "raise NotImplementedError" not in section


def missing(key: str) -> str | None:
    """What is wrong with a key, as pages write it: N is an item of a list, algorithm.x a key of a stage's algorithm."""
    key = re.sub(r"^algorithm\.", "stages.0.algorithm.", key.replace(".N", ".0"))
    try:
        kind_at(everything(), key)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", ["verl", "trl"])
def test_migration(page):
    """Every key in the second column of the tables exists; each row has one, or says that there is nothing."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", (ROOT / "docs" / "migration" / f"{page}.md").read_text(), re.MULTILINE)
    rows = [(theirs, ours) for theirs, ours in rows if not theirs.startswith(("verl", "TRL"))]
    assert len(rows) > 40
    for theirs, ours in rows:
        keys = re.findall(r"`([^`]+)`", ours)
        assert keys or ours.strip() == "-", (theirs, ours)
        assert not [problem for key in keys if (problem := missing(key))], theirs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_keys_of_pages(page):
    """`section.key` in a text and `section.key=value` in a command name keys that exist."""
    sections = {*leaf_section(), "algorithm"}
    text = page.read_text()
    if page.parent.name == "migration":  # the first column has other people's keys
        text = re.sub(r"^\| .+? \|", "|", text, flags=re.MULTILINE)
    named = re.findall(r"`([a-z_]+(?:\.\w+)+)(?:[:= ][^`]*)?`", text)
    named += re.findall(r"(?<=\s)([a-z_]+(?:\.\w+)+)=", "\n".join(commands(text)))
    files = (".py", ".md", ".yaml", ".json", ".jsonl", ".html", ".db", ".svg")
    keys = [name for name in named if name.split(".")[0] in sections and not name.endswith(files)]
    own = {"rank"}  # the tutorial's plugins
    assert not [problem for key in keys if key.split(".")[0] not in own and (problem := missing(key))]


def leaf_section() -> set[str]:
    return {key.split(".")[0] for key in leaf_keys(everything())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_yaml_of_pages(page, tmp_path):
    """Every block of YAML is a part of a configuration that the schema takes; whole ones are what a run begins with."""
    for block in blocks(page.read_text(), "yaml"):
        problems: list[str] = []
        typed(compose(block, page.name), everything(), "", problems)
        assert not problems, f"{problems} in\n{block}"
        if {"plugins", "run", "model", "data", "stages"} <= yaml.safe_load(block).keys():
            (tmp_path / "config.yaml").write_text(block)
            load_config(tmp_path / "config.yaml")


def commands(text: str) -> list[str]:
    return [line for block in blocks(text, "bash", "") for line in block.splitlines()]


def blocks(text: str, *languages: str) -> list[str]:
    """What stands between ``` and ```."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_pages(page):
    """`rl-run` in a block has sub-commands and options that exist; files of examples/ and targets of make are there."""
    import typer.main

    from rlrun.cli import COMMANDS, app

    made = typer.main.get_command(app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in commands(page.read_text()):
        words = shlex.split(line, comments=True)
        for path in (word for word in words if word.startswith("examples/")):
            assert (ROOT / path.split(",")[0]).exists(), line
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        at = next((i for i, word in enumerate(words) if word.endswith("rl-run")), None)
        if at is not None:
            name = words[at + 1] if words[at + 1] in COMMANDS else "run"
            options = {option for parameter in made.commands[name].params for option in parameter.opts}
            assert {word for word in words[at + 1:] if word.startswith("-")} <= options, line


@pytest.mark.parametrize("plugin", ["fsdp", "megatron", "prime"])
def test_readmes_of_plugins_have_all_keys(plugin):
    """Where a README says that it shows all keys with their defaults, it does."""
    text = (ROOT / "plugins" / plugin / "README.md").read_text()
    [block] = [block for block in blocks(text, "yaml") if "all keys, with their defaults" in block]
    section = OmegaConf.to_container(OmegaConf.structured(everything()))[plugin]

    shown, there = flat(yaml.safe_load(block)[plugin], ""), flat(section, "")
    assert {key for key in there if not key.startswith("optim.")} <= shown.keys()
    assert {key: there[key] for key in shown} == shown


def guide(name: str) -> dict:
    """What the guide's first block of Python defines."""
    names: dict = {}
    exec(blocks((ROOT / "docs" / "guides" / f"{name}.md").read_text(), "python")[0], names)
    return names


def test_reward_of_the_guide():
    near = guide("reward")["near"]
    item = RewardItem("", "one two three", None, "test")
    assert [near(item, target=n) for n in (3, 4, 2, 6)] == [1, 1 / 2, 1 / 2, 1 / 4]


def test_environment_of_the_guide():
    """Told more or less until it says the number, five times at the most."""
    made = guide("environment")
    assert made["plugin_info"]().provides == {"environment": {"guess": "guess:Guess"}}
    game = made["Guess"]()

    def play(*said):
        state, seen = game.reset(RewardItem("", "", "7", "test")), []
        for text in said:
            messages, reward, end = game.step(state, [{"role": "assistant", "content": text}])
            seen.append(messages[0]["content"] if messages else (reward, end))
        return seen

    assert play("3", "9", " 7 ") == ["more", "less", (1.0, True)]
    assert play("a") == [(0.0, True)]
    assert play(*"12345") == ["more"] * 4 + [(0.0, True)]


def test_links_of_readmes():
    """A link that is right in the repository leads to the site's page; what is not on the site is named."""
    def relinked(text):
        return reference.relinked(text, "plugins/fsdp/README.md", "plugins/fsdp.md")

    assert relinked("a [b](../../core/README.md) c") == "a [b](../index.md) c"
    assert relinked("![x](../../docs/plots/prime.svg)") == "![x](../plots/prime.svg)"
    assert relinked("[u](../ulysses/README.md#heads)") == "[u](ulysses.md#heads)"
    assert relinked("[x](../../examples/third_party_plugin)") == "`examples/third_party_plugin`"
    assert relinked("[x](https://example.org/a.md)") == "[x](https://example.org/a.md)"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md") if p.parent.name != "decisions"}
    made = {"reference/keys.md", "reference/hooks.md", "reference/interfaces.md", *reference.README_PAGES.values()}
    assert listed == there | made
