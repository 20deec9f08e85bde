"""The command line: exit codes, streams, what is imported, and how long it takes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlrun
from rlrun.cli import app
from rlrun.config.load import load_config
from rlrun.testing.installed import install

PLUGIN = """
from dataclasses import dataclass
from rlrun.hookspecs import PluginInfo, hookimpl

@dataclass
class Toy:
    size: int = 2

@hookimpl
def plugin_info():
    return PluginInfo("toy", 1, Toy, {"backend": {"fsdp": "MODULE:Toy"}})
"""

CONFIG = """
run: {name: test}
model: {path: some/model}
data: {train: [{kind: jsonl, path: train.jsonl}]}
reward: {kind: function}
stages: [{steps: 10}]
"""

RL_RUN = "sys.argv[0] = 'rl-run'"
HEAVY = ("torch", "ray", "transformers", "vllm", "datasets", "pyarrow", "tensorboard")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with a configuration `run.yaml` and the installed plugin `toy`."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "toy", PLUGIN)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def rl_run(site, monkeypatch):
    """rl_run(*args, code=0) in this process -> result with stdout and stderr."""
    monkeypatch.chdir(site)
    monkeypatch.syspath_prepend(str(site))

    def rl_run(*args, code=0):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == code, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return rl_run


@pytest.fixture
def process(site):
    """process(*args, code=0, before="") in a process of its own, after Python code -> result."""

    def process(*args, code=0, before=""):
        program = f"import sys\n{before}\nfrom rlrun.cli import main\nmain()"
        done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, cwd=site,
                              timeout=240, env={**os.environ, "PYTHONPATH": str(site)})
        assert done.returncode == code, done.stderr
        return done

    return process


@pytest.mark.parametrize("args, limit", [
    (["--version"], 0.5), (["plugins"], 1.5), (["run.yaml", "-p", "toy", "--print-config"], 1.5),
])
def test_quick_answers(process, args, limit):
    """What loads no model answers at once. The best of some tries counts: the machine may be busy."""
    times = []
    while not times or (min(times) > limit and len(times) < 5):
        start = time.perf_counter()
        process(*args)
        times.append(time.perf_counter() - start)
    assert min(times) < limit


@pytest.mark.parametrize("args, code", [
    (["--version"], 0), (["--help"], 0), (["plugins", "-p", "toy", "--json"], 0), (["run", "--help"], 0),
    (["run.yaml", "-p", "toy", "--print-config"], 0), (["nosuch.yaml"], 2), (["run.yaml", "-p", "toy", "trainer=5"], 2),
    (["report", "nosuch"], 2), (["new-plugin", "toy-two", "--kind", "tracker"], 0),
])
def test_nothing_heavy_is_imported(process, args, code):
    """Case 111: no torch, ray or transformers for answers that need none."""
    loaded = f"[m for m in {HEAVY} if m in sys.modules]"
    spy = f"import atexit; atexit.register(lambda: print('HEAVY', {loaded}, file=sys.stderr))"
    assert process(*args, code=code, before=spy).stderr.splitlines()[-1] == "HEAVY []"


def test_entry_modules_load_nothing_heavy():
    """Importing what the command line imports loads no torch, ray or transformers."""
    modules = "rlrun.cli, rlrun.plugins, rlrun.hookspecs, rlrun.builtin, rlrun.config.load, rlrun.discovery"
    code = f"import sys, {modules}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_driver_loads_no_model_code():
    """A run with ranks on Ray starts seconds sooner where its driver loads neither models nor compiler."""
    code = ("import sys, rlrun.launch, rlrun.workers.ray_ranks; "
            "print([m for m in ('transformers.modeling_utils', 'torch._dynamo', 'rlrun.models.policy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_and_help(rl_run):
    """Case 111: data on stdout, code 0."""
    assert rl_run("--version").stdout == f"rlrun {rlrun.__version__}\n"
    assert "rl-run CONFIG [key=value ...]" in rl_run("--help").stdout
    done = rl_run("run", "--help")
    assert "--no-plugin" in done.stdout
    assert done.stderr == ""
    for command in ("report", "doctor", "new-plugin"):
        assert f"Example: rl-run {command}" in " ".join(rl_run(command, "--help").stdout.split())


def test_shell_completion(process):
    """What the shell is told to ask is answered, from the first letters of a sub-command."""
    # the shell is named, not looked for
    named = f"{RL_RUN}; import os; os.environ['_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION'] = '1'"
    assert "_RL_RUN_COMPLETE" in process("--show-completion", "bash", before=named).stdout
    asked = {"COMP_WORDS": "rl-run do", "COMP_CWORD": "1", "_RL_RUN_COMPLETE": "complete_bash"}
    assert process(before=f"{RL_RUN}; import os; os.environ |= {asked}").stdout.split() == ["doctor"]


@pytest.mark.parametrize("args, code, message", [
    ([], 2, "Missing command"),
    (["nosuch.yaml"], 2, "there is no configuration file 'nosuch.yaml'"),
    (["plugi"], 2, "did you mean rl-run plugins?"),
    (["run"], 2, "Missing argument"),
    (["--nosuch"], 2, "No such option"),
    (["run.yaml", "--nosuch"], 2, "No such option"),
    (["."], 2, "cannot read the configuration"),
    (["run.yaml", "-p", "toy", "run.nmae=x"], 2, "run.nmae: no such key; did you mean run.name?"),
    (["run.yaml", "-p", "toy", "~run.name"], 2, "hint: to take a plugin out: --no-plugin NAME"),
    (["run.yaml", "-p", "toy", "stages.0.algorithm.prompts_per_update=3"], 2, "is not a multiple of"),
    (["run.yaml", "-p", "toy", "--resume", "nowhere"], 2, "--resume nowhere: no such checkpoint"),
    (["run.yaml", "actor.backend=nosuch"], 2, "actor.backend: no backend 'nosuch'"),
    (["run.yaml", "-p", "nosuch"], 3, "plugin 'nosuch' is not installed"),
    (["run.yaml", "-p", "./nosuch.py"], 3, "cannot be read"),
    (["plugins", "-p", "nosuch"], 3, "plugin 'nosuch' is not installed"),
    (["plugins", "extra"], 2, "unexpected extra argument"),
    (["export", "nosuch", "out"], 2, "there is no checkpoint 'nosuch'"),
    (["report", "nosuch"], 2, "nosuch holds no run"), (["docto"], 2, "did you mean rl-run doctor?"),
    (["new-plugin", "x", "--kind", "nosuch"], 2, "the kinds are algorithm, backend"),
])
def test_expected_errors(rl_run, args, code, message):
    """Case 111: a short message on stderr, the right code, no traceback, nothing on stdout."""
    done = rl_run(*args, code=code)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) < 12


def test_export_of_what_is_not_there(rl_run, tmp_path):
    """Cases 43, 111: a checkpoint without weights for others, and a folder that exists, are told without traceback."""
    for folder, message in ((tmp_path / "step_000001", "holds no Hugging Face weights"), (tmp_path / "step_000002", "exists")):
        (folder / ("hf" if "2" in folder.name else "actor")).mkdir(parents=True)
        done = rl_run("export", str(folder), str(tmp_path), code=2)
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(rl_run):
    """Expected errors have a traceback only where it is asked for."""
    done = rl_run("run.yaml", "-p", "toy", "trainer=5", "--debug", code=2)
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rl-run: trainer: '5'")


def test_print_config(rl_run, site, tmp_path, monkeypatch):
    """The printed configuration is whole and loads back to the same one; notices do not mix with it."""
    (site / "other.yaml").write_text(CONFIG + "plugins: [toy]\ntoy: {size: 3}\n")
    done = rl_run("run", "other.yaml", "model.path=/a=b@c%d", "run.name=007", "--print-config", "toy.size=4")
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "printed.yaml").write_text(done.stdout)
    config, plugins = load_config(tmp_path / "printed.yaml")
    assert (config.model.path, config.run.name, config.toy.size) == ("/a=b@c%d", "007", 4)
    assert plugins.names == ["builtin", "toy"]
    assert load_config(site / "other.yaml", ["model.path=/a=b@c%d", "run.name=007", "toy.size=4"])[0] == config
    (site / "third.py").write_text(PLUGIN.replace('"toy"', '"third"'))
    done = rl_run("other.yaml", "-p", "./third.py", "--no-plugin", "toy", "--print-config")
    assert "section are left out" in done.stderr
    assert "third:\n  size: 2" in done.stdout
    assert "toy" not in done.stdout


def test_plugins_listing(rl_run):
    """Name, distribution, version, state; hooks and provided names for what is loaded."""
    rows = {row["name"]: row for row in json.loads(rl_run("plugins", "--json", "-p", "toy").stdout)}
    assert (rows["builtin"]["state"], rows["builtin"]["dist"]) == ("builtin", "rlrun")
    assert rows["builtin"]["version"] == rlrun.__version__
    assert (rows["toy"]["state"], rows["toy"]["version"]) == ("listed", "1.0")
    assert rows["toy"]["provides"] == {"backend": ["fsdp"]}
    rows = {row["name"]: row for row in json.loads(rl_run("plugins", "--json").stdout)}
    assert rows["toy"] == {"name": "toy", "dist": "rlrun-toy", "version": "1.0", "state": "installed", "problem": None}
    text = rl_run("plugins", "--inspect").stdout
    assert "toy            installed     rlrun-toy 1.0\n    hooks: plugin_info\n    backend: fsdp" in text


RUN = """
import types
launch = types.ModuleType("rlrun.launch")
def run(config, plugins, resume):
    {body}
launch.run = run
plan = types.ModuleType("rlrun.plan")
plan.dry_run = lambda config, plugins: "the plan for " + config.run.name
sys.modules["rlrun.launch"], sys.modules["rlrun.plan"] = launch, plan
import rlrun
rlrun.launch, rlrun.plan = launch, plan
"""


@pytest.mark.parametrize("body, code, message", [
    ("return 0", 0, None),
    ("return 143", 143, None),
    ("raise ZeroDivisionError('oops')", 1, "ZeroDivisionError: oops"),
    ("raise KeyboardInterrupt", 130, "rl-run: interrupted"),
    ("from rlrun.errors import ResourceError as R; raise R('4 asked', 'ask 2')", 4, "4 asked\nhint: ask 2"),
    ("from rlrun.errors import RunError as R; raise R('failed')", 1, "rl-run: failed"),
    ("print(config.plugins, plugins.names, resume); return 0", 0, None),
])
def test_codes_of_a_run(process, body, code, message):
    """Case 111: the exit code tells what happened; unexpected errors keep their traceback."""
    done = process("run.yaml", "-p", "toy", "--resume", "never", before=RUN.format(body=body), code=code)
    if message:
        assert message in done.stderr
    assert ("Traceback" in done.stderr) == ("oops" in body)
    if "print" in body:
        assert done.stdout == "['toy'] ['builtin', 'toy'] never\n"


def test_dry_run_prints_the_plan(process):
    """The plan is data: it goes to stdout."""
    done = process("run.yaml", "-p", "toy", "--dry-run", before=RUN.format(body="return 1"))
    assert done.stdout == "the plan for test\n"


def test_closed_pipe(site):
    """A reader that stops early is no error with a traceback."""
    command = f"{sys.executable} -m rlrun plugins --json | head -c 0"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=site,
                          env={**os.environ, "PYTHONPATH": str(site)})
    assert done.stderr == ""


def test_no_colour_codes(process):
    """Output is plain where no terminal reads it."""
    for args in (["run", "--help"], ["plugins"]):
        assert "\x1b" not in process(*args).stdout


def test_console_script_is_installed():
    """The command `rl-run` exists beside the interpreter."""
    script = Path(sys.executable).with_name("rl-run")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"rlrun {rlrun.__version__}\n"
