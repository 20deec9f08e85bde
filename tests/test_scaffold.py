"""`rl-run new-plugin`: packages that build, install, pass their own tests, and run."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
import runs
from test_stranger import build, install

from rlrun.errors import ConfigError
from rlrun.scaffold import KINDS, new_plugin


@pytest.mark.parametrize("name, kind, said", [
    *((name, "reward", "no name for a plugin") for name in ("Short", "a b", "class", "-x", "../x", "é", "x-", "")),
    ("x", "engine", "kinds are algorithm"), ("actor", "reward", "section of the configuration"),
    ("grpo", "algorithm", "or algorithm of rlrun, already"), ("there", "reward", "there already"),
])
def test_refused(tmp_path, name, kind, said):
    (tmp_path / "rlrun-there").mkdir()
    with pytest.raises(ConfigError, match=said):
        new_plugin(name, kind, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["rlrun-there"]


def test_what_is_written_is_tidy(tmp_path):
    """No placeholder is left, names are spelt as each place needs them, and the linter finds nothing."""
    for kind in KINDS:
        folder = new_plugin(f"my-{kind}", kind, tmp_path)
        for path in folder.rglob("*"):
            assert path.is_dir() or path.suffix == ".yml" or "$" not in path.read_text(), path
        assert f"class My{kind.capitalize()}" in (folder / f"rlrun_my_{kind}" / f"{kind}.py").read_text()
        assert "${{ matrix.python }}" in (folder / ".github/workflows/test.yml").read_text()
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=130", "--select=E,F,W,I,UP,C4,RET,PT",
                   "--ignore=PT006", "."]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A package of each kind, and a folder with their wheels installed."""
    folder = tmp_path_factory.mktemp("made")
    packages = {kind: new_plugin(f"my-{kind}", kind, folder) for kind in KINDS}
    return packages, install([build(package, folder / "wheels" / kind) for kind, package in packages.items()], folder / "site")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_its_own_tests_pass(made, kind):
    """What the wheel holds passes the tests that came with it."""
    packages, site = made
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error::pytest.PytestDeprecationWarning",
               "tests"]
    done = subprocess.run(command, cwd=packages[kind], text=True, capture_output=True, timeout=800,
                          env=runs.environment({"PYTHONPATH": str(site)}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.slow
def test_two_steps(made, model, tmp_path):
    """A plugin of every kind in one run: two steps on two Ray ranks."""
    _, site = made
    path = runs.write_run(
        tmp_path, model, runs.grpo(2, name="my_algorithm"), resources=runs.ray(), rollout={"engine": "my_rollout"},
        actor={"backend": "my_backend"}, reward={"kind": "my_reward", "kwargs": {}},
        trainer={"trackers": ["console", "my_tracker"]}, checkpoint={"every": 1}, **{f"my_{kind}": {"long": 3} for kind in KINDS})
    done = runs.rl_run(path, "-p", ",".join(f"my_{kind}" for kind in KINDS), env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    rows = runs.metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert {row[f"my_{kind}/long"] for kind in KINDS} == {row["my_reward/long"]}
        assert 0 < row["my_reward/long"] <= 1
        assert 0 <= row["critic/score/mean"] <= 1
        assert row["my_backend/tokens"] > 16
    with (tmp_path / "run" / "my_tracker.csv").open(newline="") as file:
        kept = {(int(step), name): float(value) for step, name, value in csv.reader(file)}
    assert kept[2, "critic/score/mean"] == pytest.approx(rows[1]["critic/score/mean"])
