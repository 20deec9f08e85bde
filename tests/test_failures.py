"""How runs end: killed, stopped, interrupted, failed; and that the same command goes on from there, bit for bit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import runs
from runs import WITH_POINTS, Forks, Leftovers, checkpoints, comparable, grpo, metrics, sft, write_questions, write_run

ROLLOUT = "rlrun.generation:Generator.run"
UPDATE = "rlrun.workers.group:WorkerGroup.update"
SAVE = "rlrun.launch:Run.save"
FLUSH = "rlrun.checkpoint:flush"
PUBLISHED = "rlrun.checkpoint:Checkpoints._retain"
LOG = "rlrun.trackers.jsonl:Jsonl.log"


def two_stages(directory: Path, model: Path, **sections: Any) -> Path:
    """3 SFT steps, then 5 of GRPO with a reference model and validation; an epoch is 2 steps; checkpoints at 2, 3, 4, 6, 8."""
    directory.mkdir()
    train, validation = (write_questions(directory / f"{name}.jsonl", 8, first) for name, first in (("rows", 0), ("unseen", 50)))
    sources = {"train": [{"kind": "jsonl", "path": str(train)}], "validation": [{"kind": "jsonl", "path": str(validation)}]}
    return write_run(directory, model, sft(3), grpo(5, kl_coef=0.1, prompts_per_update=2), **{
        "plugins": WITH_POINTS, "data": sources, "validation": {"every": 2, "at_start": False}, "checkpoint": {"every": 2},
        **sections})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forks: Forks, model: Path) -> list[dict[str, Any]]:
    """Metrics of the run that nothing stopped."""
    config = two_stages(tmp_path_factory.mktemp("undisturbed") / "a", model)
    done = forks.run(config)
    assert done.returncode == 0, done.stderr
    rows = comparable(metrics(config.parent / "run"))
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert checkpoints(config.parent / "run") == [f"step_{step:06d}" for step in (2, 3, 4, 6, 8)]
    return rows


@pytest.mark.slow
def test_killed_anywhere_goes_on_bit_for_bit(
    tmp_path: Path, forks: Forks, model: Path, left: Leftovers, undisturbed: list[dict[str, Any]]
) -> None:
    """Case 114: kill -9 in an update, a save at a stage's boundary, right after one, in rollout, before metrics are logged."""
    config = two_stages(tmp_path / "a", model)
    done = []
    for point in (f"{UPDATE}@3", f"{FLUSH}@1", f"{PUBLISHED}@1", f"{ROLLOUT}@1", f"{LOG}@4"):
        assert forks.run(config, env={**left.env, "POINTS": f"{point}=kill"}).returncode == -9
        done.append([int(name[-1]) * (-1 if "partial" in name else 1) for name in checkpoints(config.parent / "run")])
        left.check()
    assert done == [[2], [-3, 2], [2, 3], [2, 3], [2, 3, 4, 6]]
    finished = forks.run(config, env=left.env)
    assert finished.returncode == 0, finished.stderr
    assert comparable(metrics(config.parent / "run")) == undisturbed
    assert checkpoints(config.parent / "run") == [f"step_{step:06d}" for step in (2, 3, 4, 6, 8)]
    left.check()


@pytest.mark.slow
def test_terminated_anywhere_saves_and_goes_on(
    tmp_path: Path, forks: Forks, model: Path, left: Leftovers, undisturbed: list[dict[str, Any]]
) -> None:
    """Case 114: SIGTERM at the start, in an update, a save, a validation, a rollout: saves, exits 143, resumes equal."""
    config = two_stages(tmp_path / "a", model)
    saved = []
    for point in ("rlrun.data.sampler:Sampler.__init__@1", f"{UPDATE}@2", f"{SAVE}@1", f"{ROLLOUT}@2", f"{ROLLOUT}@2"):
        stopped = forks.run(config, env={**left.env, "POINTS": f"{point}=term"})
        assert stopped.returncode == 143, stopped.stderr
        assert "Traceback" not in stopped.stderr
        saved.append(checkpoints(config.parent / "run")[-1:])
        left.check()
    # a step whose update has begun is finished and saved; one that is still being sampled is left, and sampled again
    assert saved == [[], *([f"step_{step:06d}"] for step in (2, 3, 4, 5))]
    finished = forks.run(config, env=left.env)
    assert finished.returncode == 0, finished.stderr
    assert comparable(metrics(config.parent / "run")) == undisturbed


@pytest.mark.slow
def test_interrupted_twice(
    tmp_path: Path, forks: Forks, model: Path, left: Leftovers, undisturbed: list[dict[str, Any]]
) -> None:
    """Case 114: SIGINT, and a second one while ending: exit 130, nothing is left, no checkpoint is spoilt."""
    config = two_stages(tmp_path / "a", model)
    for point in (f"{UPDATE}@3", f"{FLUSH}@1"):
        points = f"{point}=int rlrun.launch:Run.close@1=int rlrun.rewards.pool:RewardPool.close@1=int"
        stopped = forks.run(config, env={**left.env, "POINTS": points})
        assert stopped.returncode == 130, stopped.stderr
        assert stopped.stderr.splitlines()[-1] == "rl-run: interrupted"
        assert "Traceback" not in stopped.stderr
        assert not [name for name in checkpoints(config.parent / "run") if "partial" in name]
        left.check()
    assert forks.run(config, env=left.env).returncode == 0
    assert comparable(metrics(config.parent / "run")) == undisturbed


def test_hung_phase(tmp_path: Path, forks: Forks, model: Path, left: Leftovers) -> None:
    """Case 110: a phase over trainer.phase_timeout_s shows the stacks and ends the run, with all that it started."""
    config = write_run(tmp_path / "a", model, plugins=WITH_POINTS, trainer={"phase_timeout_s": 3.0})
    began = time.monotonic()
    hung = forks.run(config, env={**left.env, "POINTS": "rlrun.workers.rank:Rank.update@2=sleep"})
    assert hung.returncode == 1
    assert "in stuck_here" in hung.stderr
    assert time.monotonic() - began < 90
    left.check()


def test_full_disk(tmp_path: Path, forks: Forks, model: Path, left: Leftovers) -> None:
    """A save that fails leaves the checkpoint before it, is counted, and training goes on; the last save must not fail."""
    config = write_run(tmp_path / "a", model, plugins=WITH_POINTS, checkpoint={"every": 1})
    done = forks.run(config, env={**left.env, "POINTS": "rlrun.workers.rank:Rank.save@2=full"})
    assert done.returncode == 0, done.stderr
    assert "checkpoint of step 2 failed, training goes on" in done.stderr
    assert checkpoints(config.parent / "run") == ["step_000001", "step_000003", "step_000004"]
    assert [row["checkpoint/failures"] for row in metrics(config.parent / "run")] == [0, 1, 1, 1]

    last = write_run(tmp_path / "b", model, plugins=WITH_POINTS, checkpoint={"every": 1})
    failed = forks.run(last, env={**left.env, "POINTS": "rlrun.workers.rank:Rank.save@4=full"})
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert "could not be written" in failed.stderr.splitlines()[-1]
    assert checkpoints(last.parent / "run")[-1] == "step_000003"
    again = forks.run(last, env=left.env)
    assert again.returncode == 0, again.stderr
    assert checkpoints(last.parent / "run")[-1] == "step_000004"


def test_nothing_trained_is_a_failure(tmp_path: Path, forks: Forks, model: Path, left: Leftovers) -> None:
    """Case 111: where every step was skipped the run fails, and fails again when it is repeated."""
    config = write_run(tmp_path / "a", model, grpo(2, max_rounds=1), reward={"on_error": "drop"})
    (config.parent / "reward.py").write_text("def letters(item):\n    raise ValueError('no')\n")
    for _ in range(2):
        failed = forks.run(config, env=left.env)
        assert failed.returncode == 1
        assert "rl-run: stage 0 changed no model" in failed.stderr
        assert "Traceback" not in failed.stderr.partition("rl-run: ")[2]
    assert checkpoints(config.parent / "run") == []
    left.check()


def test_more_ranks_than_processors(tmp_path: Path, forks: Forks, model: Path, left: Leftovers) -> None:
    """Case 112: ranks that this machine cannot hold are refused at once, before Ray starts, with asked and available."""
    there = os.cpu_count() or 1
    config = write_run(tmp_path / "a", model, resources=runs.ray(there + 2))
    began = time.monotonic()
    refused = forks.run(config, env=left.env)
    assert time.monotonic() - began < 90
    assert refused.returncode == 4
    assert f"{there + 2} ranks on cpu need {there + 2} CPU, there are {there}" in refused.stderr
    assert "Traceback" not in refused.stderr
    left.check()


def _no_file(config: Path) -> list[str]:
    (config.parent / "train.jsonl").unlink()
    return []


def _bad_row(config: Path) -> list[str]:
    with (config.parent / "train.jsonl").open("a") as file:
        file.write("{no json\n")
    return []


def _no_model(config: Path) -> list[str]:
    return ["model.path=./nowhere"]


def _bad_plugin(config: Path) -> list[str]:
    (config.parent / "broken.py").write_text("raise RuntimeError('broken on purpose')\n")
    return ["-p", "./broken.py"]


def _bad_reward(config: Path) -> list[str]:
    (config.parent / "reward.py").write_text("import nothing_of_this_name\n")
    return []


def _no_checkpoint(config: Path) -> list[str]:
    (config.parent / "step_000001").mkdir()
    return ["--resume", str(config.parent / "step_000001")]


@pytest.mark.parametrize("spoil, code, words", [
    (_no_file, 2, "train.jsonl"), (_bad_row, 2, "25"), (_no_model, 2, "nowhere"), (_bad_plugin, 3, "broken on purpose"),
    (_bad_reward, 2, "nothing_of_this_name"), (_no_checkpoint, 2, "is not a checkpoint"),
])
def test_bad_input(tmp_path: Path, forks: Forks, model: Path, left: Leftovers, spoil: Any, code: int, words: str) -> None:
    """Case 111: what the user gave is wrong: a short message, the exit code for it, nothing is left."""
    config = write_run(tmp_path / "a", model)
    failed = forks.run(config, *spoil(config), env=left.env)
    assert failed.returncode == code, failed.stderr
    assert words in failed.stderr
    if spoil not in (_bad_plugin, _bad_reward):  # those show where the user's own code failed
        assert "Traceback" not in failed.stderr
    assert not (config.parent / "run" / "config.yaml").exists()
    left.check()


def test_reward_that_never_ends(tmp_path: Path, forks: Forks, model: Path, left: Leftovers) -> None:
    """Case 22: one of 8 samples is scored for ever: the step ends, that sample is flagged, further steps work."""
    config = write_run(tmp_path / "a", model, grpo(3, prompts_per_step=2), reward={"timeout_s": 2.0},
                       trainer={"dump_rollouts_every": 1})
    (config.parent / "reward.py").write_text(
        "import os, subprocess, time\n"
        "def letters(item):\n"
        "    try:\n"
        "        os.close(os.open('hung', os.O_CREAT | os.O_EXCL))\n"
        "    except FileExistsError:\n"
        "        return len(item.completion.encode()) / 8\n"
        "    subprocess.run(['sleep', '1000'])\n")
    done = forks.run(config, env=left.env)
    assert done.returncode == 0, done.stderr
    left.check(within=1)
    rows = metrics(config.parent / "run")
    assert rows[0]["timing_s/step"] < 10
    assert [row["reward/errors"] for row in rows] == [1, 0, 0]
    dump = (config.parent / "run" / "rollouts" / "step_000001.jsonl").read_text()
    records = [json.loads(line) for line in dump.splitlines()]
    assert len(records) == 8
    assert [r["reward"] for r in records if r["error"]] == [0.0]
    assert [r["error"] for r in records if r["error"]] == ["time-out: no score within 2 s"]


def test_run_folder(tmp_path: Path, forks: Forks, model: Path, left: Leftovers) -> None:
    """The same folder: refused while in use, done when done, anew never, changed not, from a chosen checkpoint, longer."""
    config = write_run(tmp_path / "a", model, grpo(2), checkpoint={"every": 1}, plugins=WITH_POINTS)
    run = config.parent / "run"
    forks.start(config, env={**left.env, "POINTS": f"{ROLLOUT}@2=sleep"})
    runs.wait_for(lambda: (run / "metrics.jsonl").exists() and metrics(run), 60, "first step")
    busy = runs.rl_run(config)
    assert busy.returncode == 1
    assert "is in use by another process" in busy.stderr
    assert "Traceback" not in busy.stderr
    assert forks_killed(forks, left) == -9

    assert forks.run(config).returncode == 0
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    done = forks.run(config)
    assert (done.returncode, len(metrics(run))) == (0, 2)
    assert "is done: 2 steps" in done.stderr
    for arguments, words in ((["--resume", "never"], "holds a run"),
                             (["actor.optim.lr=0.5"], "actor.optim.lr was 0.01 and is 0.5"),
                             (["stages.0.steps=3", "rollout.temperature=0.5"], "rollout.temperature was 1.0 and is 0.5")):
        refused = forks.run(config, *arguments)
        assert refused.returncode == 2, refused.stderr
        assert words in refused.stderr
        assert metrics(run) == rows

    from_first = forks.run(config, "--resume", str(run / "checkpoints" / "step_000001"))
    assert from_first.returncode == 0, from_first.stderr
    assert comparable(metrics(run)) == comparable(rows)
    assert checkpoints(run) == ["step_000001", "step_000002", "superseded-step_000002"]
    longer = forks.run(config, "stages.0.steps=3", "checkpoint.every=0")
    assert longer.returncode == 0, longer.stderr
    assert "stages.0.steps: 3 (was 2)" in longer.stderr
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]


def forks_killed(forks: Forks, left: Leftovers) -> int:
    """Kill the run in progress; its exit code."""
    os.kill(forks.pid, 9)
    code = forks.wait().returncode
    left.check()
    return code
