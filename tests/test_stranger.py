"""Plugins of other people: a package that is built and installed, and a file. Both work in every process of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from locally import train

ROOT = Path(__file__).parents[1]
FILE = '''
"""An algorithm, a reward and a metric in one file."""
import importlib.metadata

from rlrun.hookspecs import PluginInfo, hookimpl


@hookimpl
def plugin_info():
    return PluginInfo(name="extra", api_version=1, provides={
        "algorithm": {"versions": "extra:Versions"}, "reward": {"vowels": "extra:Vowels"}})


@hookimpl
def compute_metrics(step):
    return {"extra/samples": len(step.batch)}


class Vowels:
    def __call__(self, item):
        return sum(letter in "aeiou" for letter in item.completion) / 8


class Loss:
    """Tells from the ranks which version of the other plugin they see."""

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, outputs, batch):
        from rlrun.workers.protocol import Term

        minor = float(importlib.metadata.version("rlrun-brevity").split(".")[1])
        return {**self.loss(outputs, batch), "extra/minor": Term(outputs["log_probs"].new_tensor(minor), "max")}


def __getattr__(name):
    from rlrun.algorithms.policy_gradient import PolicyAlgorithm

    class Versions(PolicyAlgorithm):
        def losses(self, step):
            return {role: Loss(loss) for role, loss in super().losses(step).items()}

    if name == "Versions":
        return Versions
    raise AttributeError(name)
'''


def build(package: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(package)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = out.glob("*.whl")
    return wheel


def install(wheels: list[Path], target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run([*command, *map(str, wheels)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.slow
def test_package_and_file_in_ray_ranks(model, tmp_path):
    """Case 104: an installed stranger's algorithm and reward, then those of a file, on two Ray ranks; names and versions
    are the same everywhere. Case 10: 5 validation rows on 2 ranks are 5 scores."""
    target = install([build(ROOT / "examples" / "third_party_plugin", tmp_path / "wheels")], tmp_path / "site")
    (tmp_path / "extra.py").write_text(FILE)
    rows = [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "five.jsonl", 5, 50))}]
    parts = [{"kind": "short", "kwargs": {"characters": 2}}, {"kind": "vowels", "weight": 2.0}]
    path = runs.write_run(
        tmp_path, model, runs.grpo(2, name="brevity"), runs.grpo(2, name="versions"), brevity={"penalty": 0.5},
        data={"validation": rows}, reward={"kind": None, "kwargs": {}, "parts": parts}, validation={"at_end": True},
        resources=runs.ray(), trainer={"dump_rollouts_every": 1})
    done = runs.rl_run(path, "-p", "brevity,./extra.py", env={"PYTHONPATH": str(target)})
    assert done.returncode == 0, done.stderr
    rows = runs.metrics(tmp_path / "run")
    for row in rows:
        assert row["critic/score/mean"] + row.get("brevity/share", 0) * 0.5 == pytest.approx(
            row["reward/short"] + 2 * row["reward/vowels"], abs=1e-5)
        assert row["extra/samples"] == 16
    for row in rows[:2]:
        assert 0 < row["brevity/probability"] < 0.1
        assert row["brevity/length_std"] >= 0
        assert "extra/minor" not in row
    for row in rows[2:]:
        assert row["extra/minor"] == 1
        assert "brevity/probability" not in row
    manifest = {entry["name"]: entry for entry in json.loads((tmp_path / "run" / "plugins.json").read_text())}
    assert manifest["brevity"]["version"] == "0.1.0"
    assert (tmp_path / "run" / "extra.py").read_text() == FILE
    scored = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "validation_000004.jsonl").open()]
    assert len({record["uid"] for record in scored}) == len(scored) == 5
    assert rows[3]["val-core/five/acc/mean@1"] == pytest.approx(sum(record["correct"] for record in scored) / 5)


@pytest.mark.slow
def test_the_packages_own_tests(tmp_path):
    """What the wheel holds passes the suites that came with it."""
    package = ROOT / "examples" / "third_party_plugin"
    target = install([build(package, tmp_path / "wheels")], tmp_path / "site")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(package / "tests"),
               "-W", "error::pytest.PytestDeprecationWarning", str(package / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path,
                          env=runs.environment({"PYTHONPATH": str(target)}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_metrics_keep_to_their_own_name(model, tmp_path):
    """A plugin's metrics begin with its name; others are refused, and the message says whose they are."""
    from rlrun.errors import PluginError

    (tmp_path / "rude.py").write_text(FILE.replace('"extra', '"rude').replace("rude/samples", "actor/samples"))
    path = runs.write_run(tmp_path, model, runs.grpo(1))
    with pytest.raises(PluginError, match="rude.*actor/samples"):
        train(path, add=[str(tmp_path / "rude.py")])
