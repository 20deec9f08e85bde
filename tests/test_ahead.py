"""Engines with ranks of their own, on Ray: the same numbers as colocated, and one step ahead with a correction."""

from __future__ import annotations

import json

import pytest
import runs

APART = {"train_ranks": 1, "rollout_ranks": 1, "launcher": "ray"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return runs.write_model(tmp_path_factory.mktemp("model"))


def rows(config):
    assert (done := runs.rl_run(config)).returncode == 0, done.stderr
    return runs.metrics(config.parent / "run")


@pytest.mark.slow
def test_apart_is_as_together(model, tmp_path):
    """In step with the trainer, ranks that only generate change nothing: every metric equals the colocated run's."""
    together = rows(runs.write_run(tmp_path / "a", model))
    apart = rows(runs.write_run(tmp_path / "b", model, resources=APART))
    assert runs.comparable(apart) == runs.comparable(together)


@pytest.mark.slow
def test_one_step_ahead(model, tmp_path):
    """Each step but the first trains on samples of the policy one update older, with the correction's weights near 1 and not
    all 1; what was in flight is drawn anew after a resume, and the order of prompts is that of an undisturbed run."""
    stage = {"algorithm": {"name": "grpo", "prompts_per_step": 4, "correction": "token_tis"}, "steps": 6}
    settings = {"resources": APART, "rollout": {"max_staleness": 1, "gap_fraction": 1.0},
                "trainer": {"dump_rollouts_every": 1}, "checkpoint": {"every": 1}}
    config = runs.write_run(tmp_path / "ahead", model, stage, **settings)
    found = rows(config)
    assert [row["rollout/staleness/mean"] for row in found if "rollout/staleness/mean" in row] == [0, 1, 1, 1, 1, 1]
    weights = [row["correction/weight"] for row in found if "correction/weight" in row]
    assert all(0.5 < w < 1.5 for w in weights)
    assert any(abs(w - 1) > 1e-4 for w in weights[1:])

    resumed = runs.write_run(tmp_path / "resumed", model, {**stage, "steps": 3}, **settings)
    rows(resumed)
    again = runs.write_run(tmp_path / "resumed", model, stage, **settings)
    later = rows(again)
    assert [row["rollout/staleness/mean"] for row in later if "rollout/staleness/mean" in row] == [0, 1, 1, 0, 1, 1]

    def prompts(run):
        files = sorted((run / "rollouts").glob("step_*.jsonl"))
        return [[json.loads(line)["uid"] for line in file.open()] for file in files]

    assert prompts(config.parent / "run") == prompts(resumed.parent / "run")
