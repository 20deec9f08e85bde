"""Every two plugins that there are, in one run: they work together, or the run is refused at once and says why."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
import runs
from locally import load

from rlrun.plugins import Plugins, discover

SECTIONS = {"ulysses": {"size": 2}, "prime": {"accuracy_range": [0.0, 1.0], "drop_truncated": False}}
"""What makes a plugin work in a tiny run, where its defaults do nothing or drop all samples."""
REFUSED = {("megatron", "ulysses")}
NAMES = [row["name"] for row in discover(Plugins.load([]))]
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}


def offered(pair: tuple[str, str], kind: str, otherwise: str) -> list[str]:
    """What a run of two plugins takes of a kind: all that they provide, or else one that others do."""
    plugins = Plugins.load([name for name in pair if name != "builtin"])
    return [name for info in plugins.infos[1:] for name in info.provides.get(kind, ())] or [otherwise]


def write(directory, model, pair, backend, sections):
    """Two steps of each algorithm of the pair, with its engine and its trackers; fsdp trains where neither can. On one rank, or
    on two where sequences are spread."""
    plugins = list(dict.fromkeys([*(["fsdp"] if backend == "fsdp" else []), *(name for name in pair if name != "builtin")]))
    spread = sections and any(info.sequence_parallel for info in Plugins.load(plugins).infos)
    trackers = offered(pair, "tracker", "console")
    if "builtin" in pair:
        trackers += sorted(set(Plugins.load([]).provided("tracker")) - set(trackers))
    stages = [runs.grpo(2, name=name, **({"advantage": "rloo"} if name == "prime" else {}))
              for name in offered(pair, "algorithm", "grpo")]
    return runs.write_run(
        directory, model, *stages, plugins=plugins, actor={"backend": backend}, resources=runs.ray() if spread else {},
        rollout={"engine": offered(pair, "rollout", "hf")[0]}, trainer={"trackers": trackers},
        **{name: section for name, section in sections.items() if name in plugins})


def works(path, pair, backend):
    """The run takes its steps, and every plugin does its part."""
    config, plugins = load(path)
    done = runs.rl_run(path, env=OFFLINE)
    assert done.returncode == 0, done.stderr
    directory = path.parent / "run"
    rows = runs.metrics(directory)
    assert [row["step"] for row in rows] == list(range(1, 2 * len(config.stages) + 1))
    assert all(0 < row["actor/grad_norm"] < float("inf") for row in rows)
    recorded = {entry["name"] for entry in json.loads((directory / "plugins.json").read_text())}
    assert recorded >= {*pair, "builtin"}
    for info in plugins.infos:
        if "compute_metrics" in plugins.hooks(info.name):
            assert all(any(key.startswith(f"{info.name}/") for key in row) for row in rows)
    for tracker in {"tensorboard", "wandb", "mlflow"} & set(config.trainer.trackers):
        assert list(directory.glob(f"{tracker}*")), f"{tracker} kept nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", list(combinations(NAMES, 2)), ids="-".join)
def test_pair(tmp_path, model, pair):
    """Case 109: two steps, with each backend of the pair; or an end before any rank starts, whose reason names both
    plugins, and then they are still fine where one of them has nothing to do."""
    for backend in offered(pair, "backend", "fsdp"):
        path = write(tmp_path / backend, model, pair, backend, SECTIONS)
        if tuple(sorted(pair)) in REFUSED:
            done = runs.rl_run(path)
            assert done.returncode in (2, 3), done.stderr
            assert all(name in done.stderr for name in pair), done.stderr
            assert "Traceback" not in done.stderr
            assert not (tmp_path / backend / "run").exists()
            path = write(tmp_path / "idle", model, pair, backend, {})
        else:
            config, plugins = load(path)
            degrees = [info.sequence_parallel(config) for info in plugins.infos if info.sequence_parallel]
            assert 1 not in degrees, "SECTIONS must make every plugin of the pair work"
            assert plugins.layout(config).dp == 1
        works(path, pair, backend)
