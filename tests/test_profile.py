"""Traces of chosen steps on chosen ranks, under either backend."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import runs
from locally import load, train


def calls(trace: Path) -> Counter[str]:
    """How often each operation stands in a trace."""
    return Counter(event.get("name", "") for event in json.loads(gzip.open(trace).read())["traceEvents"])


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_chosen_steps(model, tmp_path, backend):
    """Steps 2 and 3 of 4 are traced, each from its rollout to its two updates, and change no metric."""
    profile = {"profile": {"use_profile": True, "step_start": 2, "step_end": 3}}
    found = {}
    for name, section in (("traced", profile), ("plain", {})):
        stages = [runs.sft(2), runs.grpo(2, prompts_per_update=2)]
        path = runs.write_run(tmp_path / name, model, *stages, plugins=[backend],
                              actor={"backend": backend}, **{backend: section})
        found[name] = train(path)
    assert found["traced"] == found["plain"]
    folder = tmp_path / "traced/run/profile"
    assert sorted(file.name for file in folder.iterdir()) == ["step_000002_rank_0.json.gz", "step_000003_rank_0.json.gz"]
    assert not (tmp_path / "plain/run/profile").exists()
    supervised, generated = (calls(file) for file in sorted(folder.iterdir()))
    step = "Optimizer.step#AdamW.step"
    assert (supervised[step], generated[step]) == (1, 2)
    assert generated["aten::embedding"] > supervised["aten::embedding"] + 4, "tokens one by one"
    assert supervised["autograd::engine::evaluate_function: MmBackward0"] + generated["aten::mm"] > 0


@pytest.mark.slow
def test_chosen_ranks(model, tmp_path):
    """One of two ranks on Ray, into a folder of the user's."""
    path = runs.write_run(tmp_path, model, runs.grpo(2), resources=runs.ray())
    done = runs.rl_run(path, "fsdp.profile.use_profile=true", "fsdp.profile.profile_ranks=[1]",
                       f"fsdp.profile.save_path={tmp_path / 'traces'}")
    assert done.returncode == 0, done.stderr
    [trace] = (tmp_path / "traces").iterdir()
    assert trace.name == "step_000001_rank_1.json.gz"
    assert calls(trace)["Optimizer.step#AdamW.step"] == 1


@pytest.mark.parametrize("values, words", [
    (["fsdp.profile.step_start=3", "fsdp.profile.step_end=2"], "step_end = 2 is before step_start = 3"),
    (["fsdp.profile.profile_ranks=[1]"], r"profile_ranks = \[1\]; training ranks are 0 to 0"),
])
def test_nothing_to_trace(model, tmp_path, values, words):
    from rlrun.config.validate import validate_resolved

    path = runs.write_run(tmp_path, model)
    with pytest.raises(ValueError, match=words):
        validate_resolved(*load(path, "fsdp.profile.use_profile=true", *values))
