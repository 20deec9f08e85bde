"""Plugins: how they are found, checked, ordered and called."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pluggy
import pytest

from rlrun.config.schema import Config
from rlrun.errors import ConfigError, PluginError
from rlrun.hookspecs import Step
from rlrun.plugins import Plugins, discover
from rlrun.testing.installed import install

HEAD = """
from dataclasses import dataclass
from rlrun.hookspecs import PluginInfo, hookimpl
"""
BODY = HEAD + """
@hookimpl
def plugin_info():
    return PluginInfo({name!r}, {api}, {config}, {provides})
"""


def body(name, api=1, config=None, provides="{}", more=""):
    return BODY.format(name=name, api=api, config=config, provides=provides) + more


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path that distributions are installed to."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def step(metrics=None):
    return Step(3, 0, Config(), None, metrics or {})


def worker(backend):
    return SimpleNamespace(spec=SimpleNamespace(backend=backend, role="actor"))


def test_presets_of_plugins(site):
    """A name that a plugin provides sets its fields of the stage's options; presets of other names are refused."""
    algorithm = "{{'algorithm': {{'own': 'x:X'}}}}, presets={{{0!r}: {{'clip_low': 0.1}}}}"
    install(site, "a", body("a", provides=algorithm.format("own")))
    install(site, "b", body("b", provides=algorithm.format("grpo")))
    presets = Plugins.load(["a"]).presets
    assert presets["own"] == {"clip_low": 0.1}
    assert presets["dapo"]["clip_high"] == 0.28
    with pytest.raises(PluginError, match="has presets of grpo, which it does not provide"):
        Plugins.load(["b"])


def test_builtin_is_first_and_listed_order_is_kept(site):
    """Case 108: the order is the user's list, never that of discovery or of names."""
    metric = "@hookimpl\ndef compute_metrics(step):\n    step.batch.append({0!r})\n    return {{'{0}/x': 1}}\n"
    for name in ("b", "a", "c"):
        install(site, name, body(name, more=metric.format(name)))
    for order in (["c", "a", "b"], ["a", "b", "c"]):
        plugins, called = Plugins.load(order), []
        assert plugins.names == ["builtin", *order]
        assert [info.name for info in plugins.infos] == ["builtin", *order]
        metrics = plugins.compute_metrics(Step(0, 0, Config(), called, {}))
        assert called == order
        assert list(metrics) == [f"{name}/x" for name in order]


def test_pluggy_itself_would_reverse_the_order(site):
    """Case 108: the adapter is needed, and its wrappers nest in the list's order: the first is outermost."""
    wrapper = ("@hookimpl(wrapper=True)\ndef compute_metrics(step):\n    step.batch.append({0!r})\n"
               "    return (yield)\n")
    metric = "@hookimpl\ndef compute_metrics(step):\n    step.batch.append('m')\n    return {'m/x': 1.5}\n"
    for name in ("w", "v"):
        install(site, name, body(name, more=wrapper.format(name)))
    install(site, "m", body("m", more=metric))
    called = []
    metrics = Plugins.load(["w", "m", "v"]).compute_metrics(Step(0, 0, Config(), called, {}))
    assert (called, metrics) == (["w", "v", "m"], {"m/x": 1.5})


def test_unlisted_plugins_are_never_imported(site):
    """Case 103: a broken plugin that nobody listed stops nothing, and the listed one loads."""
    broken = install(site, "broken", "import no_such_package_here")
    fine = install(site, "fine", body("fine"))
    plugins = Plugins.load(["fine"])
    assert plugins.names == ["builtin", "fine"]
    assert fine in sys.modules
    assert broken not in sys.modules
    assert {row["name"]: row["state"] for row in discover(plugins)}["broken"] == "installed"


@pytest.mark.parametrize("code, cause", [
    ("import no_such_package_here", "ModuleNotFoundError: No module named 'no_such_package_here'"),
    ("1 / 0", "ZeroDivisionError"),
    ("def (", "SyntaxError"),
    (HEAD + "@hookimpl\ndef plugin_info():\n    raise KeyError('k')", "plugin_info() raises KeyError"),
])
def test_broken_listed_plugin_is_named(site, code, cause):
    """Case 103: plugin, distribution, version, cause and fix are told."""
    install(site, "broken", code, version="2.5")
    with pytest.raises(PluginError) as caught:
        Plugins.load(["broken"])
    assert "plugin 'broken' (rlrun-broken 2.5) is broken" in str(caught.value)
    assert cause in str(caught.value)
    assert "install what it needs" in caught.value.hint


def test_missing_plugin(site):
    """A plugin that is not installed is named, with the installed ones and a way to get it."""
    install(site, "fine", body("fine"))
    with pytest.raises(PluginError, match="'nosuch' is not installed; installed plugins: .*fine") as caught:
        Plugins.load(["nosuch"])
    assert "pip install rlrun-nosuch" in caught.value.hint


@pytest.mark.parametrize("requires, fits", [
    ("rlrun~=0.1.0", True), ("rlrun>=0.1,<1", True), ("", True), ("RLrun", True),
    ("rlrun~=0.9.0", False), ("rlrun<0.1", False),
    ('rlrun<0.1; python_version < "3"', True), ('rlrun<0.1; extra == "old"', True),
])
def test_requirement_is_checked_before_import(site, requires, fits):
    """An incompatible distribution is refused before any of its code runs."""
    module = install(site, "req", body("req"), requires=requires)
    if fits:
        assert Plugins.load(["req"]).names == ["builtin", "req"]
        return
    with pytest.raises(PluginError, match=r"\(rlrun-req 1.0\) is incompatible: it requires rlrun.*this is rlrun 0"):
        Plugins.load(["req"])
    assert module not in sys.modules
    assert {row["name"]: row["state"] for row in discover(Plugins.load([]), load=True)}["req"] == "incompatible"
    assert module not in sys.modules


@pytest.mark.parametrize("code, attribute, message", [
    (body("p", api=99), "", "plugin API 99, this rlrun has 1"),
    (body("other"), "", "calls itself 'other'"),
    (HEAD, "", "has no plugin_info"),
    (HEAD + "def plugin_info():\n    return PluginInfo('p', 1)", "", "has no plugin_info"),
    (HEAD + "@hookimpl\ndef plugin_info():\n    return 5", "", "returned 5, not a PluginInfo"),
    (HEAD + "@hookimpl\ndef plugin_info():\n    return None", "", "returned None"),
    (body("p", more="class P:\n    pass"), "P", "is a class"),
    (body("p", config="int"), "", "must be a dataclass"),
    (body("p", provides="{'backnd': {}}"), "", "provides a 'backnd'; the kinds are: backend, algorithm"),
    (body("p", provides="{'reward': {'x': 'os.path'}}"), "", "not 'package.module:Class'"),
])
def test_wrong_plugins_are_refused(site, code, attribute, message):
    """Cases 103, 107: what is wrong with a plugin shows at load, with its name."""
    install(site, "p", code, attribute=attribute)
    with pytest.raises(PluginError, match=message) as caught:
        Plugins.load(["p"])
    assert "plugin 'p' (rlrun-p 1.0)" in str(caught.value)


@pytest.mark.parametrize("impl, message", [
    ("@hookimpl\ndef compute_metrcs(step): pass", "unknown hook 'compute_metrcs'"),
    ("@hookimpl\ndef compute_metrics(stepp): pass", "stepp"),
    ("@hookimpl\ndef compute_metrics(step, limt=3): pass", "would never receive parameter 'limt=3'"),
    ("@hookimpl\ndef compute_metrics(*, step): pass", "would never receive parameter 'step'"),
    ("@hookimpl(tryfirst=True)\ndef compute_metrics(step): pass", "tryfirst"),
    ("@hookimpl(trylast=True)\ndef compute_metrics(step): pass", "trylast"),
    ("@hookimpl(specname='plugin_info')\ndef again(): pass", "'p'"),
])
def test_wrong_implementations_are_refused(site, impl, message):
    """Case 107: misspelt hooks and parameters fail at load, and name the plugin."""
    install(site, "fine", body("fine"))
    install(site, "p", body("p", more=impl))
    with pytest.raises(PluginError, match=message) as caught:
        Plugins.load(["fine", "p"])
    assert "plugin 'p' (rlrun-p 1.0)" in str(caught.value)


def test_parameter_with_default_gets_the_callers_value(site):
    """Case 106: a default in an implementation does not hide what core passes."""
    install(site, "p", body("p", more="@hookimpl\ndef compute_metrics(step=None):\n    return {'p/n': step.number}"))
    assert Plugins.load(["p"]).compute_metrics(step()) == {"p/n": 3.0}
    assert tuple(map(int, pluggy.__version__.split(".")[:2])) >= (1, 7)


def test_two_providers_of_one_name(site):
    """Case 108: choice is by name; a name that two distributions provide is an error that names both."""
    for name in ("one", "two"):
        install(site, name, body(name, provides="{'backend': {'fast': 'os:PathLike'}}"))
    with pytest.raises(PluginError, match=r"backend 'fast'.*rlrun-one 1.0.*rlrun-two 1.0"):
        Plugins.load(["one", "two"])
    install(site, "mine", body("mine", provides="{'algorithm': {'grpo': 'os:PathLike'}}"))
    with pytest.raises(PluginError, match=r"algorithm 'grpo'.*'builtin' \(rlrun .*rlrun-mine 1.0"):
        Plugins.load(["mine"])


def test_two_distributions_with_one_plugin_name(site):
    """A plugin name that two distributions use cannot be chosen."""
    install(site, "twin", body("twin"))
    install(site, "twin", body("twin"), dist="other-twin")
    with pytest.raises(PluginError, match="'twin' is installed by .* and ") as caught:
        Plugins.load(["twin"])
    assert "rlrun-twin 1.0" in str(caught.value)
    assert "other-twin 1.0" in str(caught.value)


def test_names_that_cannot_be(site):
    """Names of core sections, of builtin, twice in the list."""
    install(site, "actor", body("actor"))
    with pytest.raises(PluginError, match="name of a core section"):
        Plugins.load(["actor"])
    install(site, "p", body("p"))
    for twice in (["p", "p"], ["builtin"]):
        with pytest.raises(PluginError, match="listed twice"):
            Plugins.load(twice)


def test_resolve_and_provider(site):
    """Classes are imported when chosen, not before; unknown names bring the nearest and what to add."""
    install(site, "p", body("p", provides="{'reward': {'mine': 'MODULE:Mine', 'gone': 'MODULE:Gone', 'f': 'MODULE:f',"
                                          " 'lazy': 'no_such_module:X'}}", more="class Mine: pass\ndef f(): pass"))
    install(site, "q", body("q"))
    plugins = Plugins.load(["p"])
    assert plugins.resolve("reward", "mine").__name__ == "Mine"
    assert plugins.provider("reward", "mine") == "p"
    assert plugins.provided("reward")["function"] == "rlrun.rewards.function:FunctionReward"
    for name, message in (("gone", "AttributeError"), ("f", "is not a class"), ("lazy", "no_such_module")):
        with pytest.raises(PluginError, match=rf"'p' \(rlrun-p 1.0\) provides reward '{name}'.*{message}"):
            plugins.resolve("reward", name)
    with pytest.raises(ConfigError, match="no reward 'functoin'; there is: .*function") as caught:
        plugins.resolve("reward", "functoin")
    assert caught.value.hint == "did you mean 'function'?"
    with pytest.raises(ValueError, match="no backend 'q'; there is: none") as caught:
        plugins.resolve("backend", "q")
    assert "add -p q" in caught.value.hint


def test_worker_hooks_go_to_the_provider_alone(site):
    """Case 108: with two backends listed, the one that provides the name is called, and must answer."""
    more = """
from types import SimpleNamespace
@hookimpl
def make_worker(spec):
    return None if spec.role == 'none' else SimpleNamespace(spec=spec, by={0!r})
@hookimpl
def save_checkpoint(worker, directory, contents):
    directory.append(({0!r}, tuple(contents)))
"""
    for name in ("one", "two"):
        install(site, name, body(name, provides=f"{{'backend': {{'{name}': 'os:PathLike'}}}}", more=more.format(name)))
    for order in (["one", "two"], ["two", "one"]):
        plugins = Plugins.load(order)
        for name in order:
            made = plugins.make_worker(SimpleNamespace(backend=name, role="actor"), None)
            assert made.by == name
            saved = []
            plugins.save_checkpoint(made, saved, ["model"])
            assert saved == [(name, ("model",))]
        with pytest.raises(PluginError, match=r"'one' \(rlrun-one 1.0\): make_worker is missing or returned None"):
            plugins.make_worker(SimpleNamespace(backend="one", role="none"), None)
        with pytest.raises(PluginError, match=r"'two' \(rlrun-two 1.0\) has no load_checkpoint"):
            plugins.load_checkpoint(worker("two"), Path("."), [])
        with pytest.raises(ConfigError, match="no backend 'three'; there is: one, two"):
            plugins.make_worker(SimpleNamespace(backend="three", role="actor"), None)


def test_patch_attention_has_one_answer(site):
    """Case 109: two plugins that both answer are an error naming both; nobody is fine; None does not count."""
    answer = "@hookimpl\ndef patch_attention(model, spec):\n    return {0!r} if model in ('both', {0!r}) else None\n"
    for name in ("one", "two"):
        install(site, name, body(name, more=answer.format(name)))
    plugins = Plugins.load(["one", "two"])
    assert plugins.patch_attention("one", None, None) == "one"
    assert plugins.patch_attention("two", None, None) == "two"
    assert plugins.patch_attention("none", None, None) is None
    with pytest.raises(PluginError, match=r"patch_attention.*rlrun-one 1.0.*rlrun-two 1.0"):
        plugins.patch_attention("both", None, None)


@pytest.mark.parametrize("answer, message", [
    ("{'p/x': 2, 'p/y': 0.5}", None),
    ("{}", None),
    ("{'x': 1}", "begin with 'p/'"),
    ("{'q/x': 1}", "begin with 'p/'"),
    ("{'p/core': 1}", "must be new"),
    ("{'p/x': '1'}", "not a float"),
    ("{'p/x': True}", "not a float"),
    ("None", "returned None, not a dict"),
])
def test_metrics_are_checked(site, answer, message):
    """A plugin's metrics are floats under its own name."""
    install(site, "p", body("p", more=f"@hookimpl\ndef compute_metrics():\n    return {answer}"))
    plugins = Plugins.load(["p"])
    if message is None:
        metrics = plugins.compute_metrics(step())
        assert metrics == eval(answer)
        assert all(type(value) is float for value in metrics.values())
        return
    with pytest.raises(PluginError, match=message) as caught:
        plugins.compute_metrics(step({"p/core": 1.0}))
    assert "plugin 'p' (rlrun-p 1.0)" in str(caught.value)


def test_exceptions_in_hooks_name_plugin_and_hook(site):
    """An exception keeps its type and says where it came from."""
    install(site, "p", body("p", more="@hookimpl\ndef compute_metrics(): raise LookupError('inner')"))
    with pytest.raises(LookupError, match="inner") as caught:
        Plugins.load(["p"]).compute_metrics(step())
    assert caught.value.__notes__ == ["raised in hook compute_metrics of plugin 'p' (rlrun-p 1.0)"]
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == caught.value.__notes__


FILE = HEAD + """
class Mine:
    pass

@dataclass
class Options:
    size: int = 2

@hookimpl
def plugin_info():
    return PluginInfo("mine", 1, Options, {"reward": {"a": "mine:Mine", "b": f"{__name__}:Mine"}})
"""


def test_plugin_in_a_file(tmp_path):
    """Case 104: a file is named by its stem, hashed, and copied with the run."""
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    plugins = Plugins.load([str(path)])
    assert plugins.names == ["builtin", "mine"]
    assert plugins.resolve("reward", "a") is plugins.resolve("reward", "b")
    assert plugins.provided("reward")["a"] == plugins.provided("reward")["b"]
    assert plugins.files() == [(plugins.resolve("reward", "a").__module__, str(path))]
    entry = plugins.manifest()[1]
    assert entry["path"] == str(path)
    assert len(entry["sha256"]) == 64
    (tmp_path / "run").mkdir()
    plugins.copy_files_to(tmp_path / "run")
    assert (tmp_path / "run" / "mine.py").read_text() == FILE
    path.write_text(FILE + "\n1 / 0\n")
    with pytest.raises(PluginError, match="mine.py.*is broken: running it raises ZeroDivisionError"):
        Plugins.load([str(path)])
    with pytest.raises(PluginError, match="cannot be read"):
        Plugins.load([str(tmp_path / "nosuch.py")])
    (tmp_path / "my-plugin.py").write_text(FILE.replace('"mine"', '"my-plugin"'))
    with pytest.raises(PluginError, match="letters, digits and _"):
        Plugins.load([str(tmp_path / "my-plugin.py")])


def test_other_process_without_the_file(tmp_path, site):
    """Case 104: a process that has no such file loads it from the pickle; names and versions are compared."""
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    install(site, "p", body("p"))
    plugins = Plugins.load([str(path), "p"])
    reward = plugins.resolve("reward", "a")()
    (tmp_path / "data").write_bytes(pickle.dumps((plugins, reward)))
    path.unlink()
    code = ("import pickle, sys, json; plugins, reward = pickle.load(open(sys.argv[1], 'rb'));"
            "assert type(reward) is plugins.resolve('reward', 'a');"
            "assert plugins is pickle.loads(pickle.dumps(plugins)); print(json.dumps(plugins.manifest()))")
    command = [sys.executable, "-c", code, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(site)}, check=True)
    assert json.loads(done.stdout) == plugins.manifest()
    info = site / "rlrun_p-1.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("Version: 1.0", "Version: 1.1"))
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(site)})
    assert done.returncode != 0
    assert "plugin 2 of the list differs" in done.stderr
    assert "'1.1'" in done.stderr


def test_manifests_are_compared_in_order(site):
    """Case 104: another order, a version, a missing plugin or a changed file is named; the path of a file is free."""
    for name in ("a", "b"):
        install(site, name, body(name))
    ab, ba, a = Plugins.load(["a", "b"]), Plugins.load(["b", "a"]), Plugins.load(["a"])
    ab.check_same(json.loads(json.dumps(ab.manifest())))
    for other in (ba, a):
        with pytest.raises(PluginError, match="differs between processes"):
            ab.check_same(other.manifest())
    moved = [{**entry, "path": "/elsewhere"} for entry in ab.manifest()]
    ab.check_same(moved)
    with pytest.raises(PluginError, match="plugin 1 of the list.*'9'"):
        ab.check_same([moved[0], {**moved[1], "version": "9"}, moved[2]])
    with pytest.raises(PluginError, match="plugin 2 of the list.*ffff"):
        ab.check_same([*moved[:2], {**moved[2], "sha256": "ffff"}])


def test_discover(site):
    """Listing reads metadata only; with load it tells hooks, names and what is broken."""
    install(site, "listed", body("listed", provides="{'reward': {'r': 'os:PathLike'}}"))
    other = install(site, "other", body("other", more="@hookimpl\ndef compute_metrics(): return {}"))
    install(site, "broken", "1 / 0")
    plugins = Plugins.load(["listed"])
    rows = {row["name"]: row for row in discover(plugins)}
    assert [rows[name]["state"] for name in ("builtin", "listed", "other")] == ["builtin", "listed", "installed"]
    assert rows["listed"]["provides"] == {"reward": ["r"]}
    assert other not in sys.modules
    assert "hooks" not in rows["other"]
    rows = {row["name"]: row for row in discover(plugins, load=True)}
    assert rows["other"]["hooks"] == ["compute_metrics", "plugin_info"]
    assert rows["broken"]["state"] == "broken"
    assert "ZeroDivisionError" in rows["broken"]["problem"]
    json.dumps(list(rows.values()))


def test_instance_as_plugin(site):
    """An entry point may name an instance."""
    install(site, "p", HEAD + """
class P:
    @hookimpl
    def plugin_info(self):
        return PluginInfo("p", 1)
    @hookimpl
    def compute_metrics(self, step):
        return {"p/n": step.number}
it = P()
""", attribute="it")
    assert Plugins.load(["p"]).compute_metrics(step()) == {"p/n": 3.0}
