"""docs/authoring.md, as it stands: its files are written, its commands run, in order."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import runs

PAGE = Path(__file__).parents[1] / "docs" / "authoring.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = []
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "bash":
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                done.append(line)
                if line.startswith("pip install -e"):
                    install(tmp_path / arguments[-1].removesuffix("[test]"), monkeypatch)
                else:
                    PROGRAMS[program](arguments)
        else:
            path = Path(re.match(r"# (\S+)\n", text)[1])
            assert path.name == "config.yaml" or path.parent.is_dir(), f"{path}: the scaffold has no such folder"
            path.write_text(text)
    assert sum(line.startswith("rl-run config.yaml") for line in done) == 4
    rows = {name: runs.metrics(tmp_path / "runs" / name) for name in ("rank", "close", "tally", "all")}
    assert all([row["step"] for row in some] == [1, 2] for some in rows.values())
    for name, most in (("rank", 0.5), ("all", 1.0)):
        found = [row[f"critic/advantages/{end}"] for row in rows[name] for end in ("max", "min")]
        assert all(abs(x) <= most for x in found)
        assert any(found)
    for row in rows["close"]:
        assert 0 <= row["critic/correct/mean"] <= row["critic/score/mean"] < 1
    for row in [*rows["tally"], *rows["all"]]:
        drawn = row["response_length/mean"] * 32
        assert row["tally/loss_share"] == pytest.approx(drawn / row["perf/total_num_tokens"])
    assert (tmp_path / "runs" / "rank" / "report.html").stat().st_size > 10000


def rl_run(arguments: list[str]) -> None:
    """In this process: what the run folders say is checked."""
    from rlrun.cli import app

    assert not app(arguments, standalone_mode=False)


def python(arguments: list[str]) -> None:
    flag, module, *rest = arguments
    assert flag == "-m"
    importlib.import_module(module).main(rest)


def pytest_(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=runs.environment())
    assert done.returncode == 0, done.stdout + done.stderr


PROGRAMS = {"rl-run": rl_run, "python": python, "pytest": pytest_}


def install(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install -e` would, without an index: the package on the path, and its metadata."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = package / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {one}\n" for one in project["dependencies"])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}")
    points = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in some.items())
                     for group, some in project["entry-points"].items())
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=":")
