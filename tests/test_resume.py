"""A resumed run goes on as if it had never stopped: every metric, bit for bit, and every completion."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import runs
from locally import train

STOPPER = '''
"""Ends the run in the middle of one step."""
import os

from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl


@hookimpl
def plugin_info():
    return PluginInfo(name="stopper", api_version=API_VERSION)


@hookimpl
def compute_metrics(step):
    if step.number > int(os.environ["STOP_AFTER"]):
        raise KeyboardInterrupt
    return {}
'''


@pytest.fixture(scope="module")
def stopper(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "stopper.py"
    path.write_text(STOPPER)
    return str(path)


def interrupted(path: Path, stopper: str, after: int) -> list[dict]:
    """The metrics of a run that was stopped in step `after` + 1, and started again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_AFTER", str(after))
        with pytest.raises(KeyboardInterrupt):
            train(path, add=[stopper])
    return train(path)


def completions(path: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in (path.parent / "run" / "rollouts").iterdir()}


def check(tmp_path, model, stopper, stops, *stages, **sections):
    """Runs that were stopped after each of `stops` steps equal the whole run. Returns its metrics and completions."""
    sections = {"trainer": {"dump_rollouts_every": 1}, **sections}
    rows = {"data": {"train": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "train.jsonl", 16))}]}}
    whole = runs.write_run(tmp_path / "whole", model, *stages, **{**rows, **sections})
    expected = train(whole)
    for stop in stops:
        part = runs.write_run(tmp_path / f"part{stop}", model, *stages, **{**rows, **sections, "checkpoint": {"every": stop}})
        got = interrupted(part, stopper, stop)
        assert [row["step"] for row in got] == [row["step"] for row in expected], stop
        for row, other in zip(got, expected):
            assert row == other, (stop, row["step"])
        assert completions(part) == completions(whole)
    return expected, completions(whole)


def test_in_and_between_epochs(model, stopper, tmp_path):
    """Cases 46, 47: 2 epochs of 4 steps, stopped before, at and after the end of the first; each prompt comes once an
    epoch, in another order in the second."""
    stage = runs.grpo()
    stage = {"algorithm": stage["algorithm"], "epochs": 2}
    rows, dumps = check(tmp_path, model, stopper, [3, 4, 5], stage)
    assert len(rows) == 8
    order = [uid for name in sorted(dumps) for uid in uids(dumps[name])]
    assert sorted(order[:16]) == sorted(order[16:]) == sorted(set(order))
    assert order[:16] != order[16:]


def uids(dump: str) -> list[str]:
    import json

    return list(dict.fromkeys(json.loads(line)["uid"] for line in dump.splitlines()))


def test_reuse_and_weighted_sources(model, stopper, tmp_path):
    """Cases 49, 50: two epochs over each step's samples, two updates each; both of two weighted sources go on."""
    sources = [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "a.jsonl", 10)), "weight": 3},
               {"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "b.jsonl", 10, 40)), "weight": 1}]
    stage = runs.grpo(5, epochs_per_step=2, prompts_per_update=2)
    rows, dumps = check(tmp_path, model, stopper, [3], stage, data={"train": sources})
    assert [sum(uid.startswith("b") for uid in uids(dumps[name])) for name in sorted(dumps)] == [1] * 5
    assert any(row["actor/ppo_kl"] for row in rows)


def test_ppo(model, stopper, tmp_path):
    """Cases 51, 52: critic, its optimizer, the adaptive KL coefficient and a warmed-up cosine schedule go on."""
    optim = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1}
    stage = runs.grpo(6, name="ppo", kl_coef=0.1, kl_in="reward", kl_estimator="k1", kl_target=0.01, kl_horizon=50)
    rows, _ = check(tmp_path, model, stopper, [2, 4], stage, actor={"optim": optim}, critic={"optim": {**optim, "lr": 1e-3}})
    rates = [row["actor/lr"] for row in rows]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert rates[-1] == pytest.approx(1e-3)
    assert [row["critic/lr"] for row in rows] == pytest.approx([rate / 10 for rate in rates])
    assert len({row["actor/reward_kl_penalty_coeff"] for row in rows}) == 6


def test_across_stages(model, stopper, tmp_path):
    """Stopped inside, between and after stages: the second one's reference model is the policy that it began with."""
    validation = {"data": {
        "train": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "train.jsonl", 16))}],
        "validation": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "other.jsonl", 5, 50))}]}}
    stages = runs.sft(3), runs.grpo(3, kl_coef=0.1, kl_estimator="k2")
    rows, _ = check(tmp_path, model, stopper, [2, 3, 4], *stages, **validation, validation={"every": 2, "at_end": True})
    assert [row["training/stage"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["step"] for row in rows if "val-core/other/acc/mean@1" in row] == [2, 3, 4, 6]
    assert rows[3]["actor/kl_loss"] == 0 < rows[5]["actor/kl_loss"]


@pytest.mark.parametrize("length, expected", [({"steps": 5}, [2, 4, 5]), ({"steps": 4}, [2, 4]), ({"epochs": 1}, [2, 4, 6])])
def test_last_step_is_saved_once(length, expected, model, tmp_path):
    """Case 41: by steps and by epochs, also where a checkpoint is due anyway."""
    stage = {"algorithm": {"name": "sft", "prompts_per_step": 4}, **length}
    path = runs.write_run(tmp_path, model, stage, checkpoint={"every": 2})
    train(path)
    assert runs.checkpoints(tmp_path / "run") == [f"step_{step:06d}" for step in expected]


def test_asynchronous_saving(model, tmp_path, monkeypatch):
    """Saving beside training changes no number; a full disk is counted and costs one checkpoint; the run's end waits."""
    import rlrun_fsdp.checkpoint as checkpoint

    expected = train(runs.write_run(tmp_path / "plain", model, runs.grpo(5), checkpoint={"every": 1}))
    path = runs.write_run(tmp_path / "beside", model, runs.grpo(5), checkpoint={"every": 1, "keep": None, "async_save": True})
    write, calls, beside = checkpoint.dcp_save, [], []

    def slow(*args, **kwargs):
        calls.append(threading.current_thread() is threading.main_thread())
        beside.append(runs.checkpoints(tmp_path / "beside/run"))
        time.sleep(0.3)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "dcp_save", slow)
    rows = train(path)
    failures = [row.pop("checkpoint/failures") for row in rows]
    assert failures[0] == 0
    assert failures[-1] == 1
    assert rows == [{k: v for k, v in row.items() if k != "checkpoint/failures"} for row in expected]
    assert calls == [False] * 5
    assert all(any("partial" in name for name in names) for names in beside)
    assert runs.checkpoints(tmp_path / "beside/run") == [f"step_{step:06d}" for step in (1, 3, 4, 5)]
    monkeypatch.undo()
    assert train(path, "stages.0.steps=6")[:5] == train(path)[:5]


def test_a_run_that_is_done_can_get_more_steps(model, tmp_path):
    """Case 46: done means done, until the configuration asks for more."""
    path = runs.write_run(tmp_path, model, runs.grpo(3))
    first = train(path)
    assert train(path) == first
    longer = train(path, "stages.0.steps=5")
    assert longer[:3] == first
    other = runs.write_run(tmp_path / "other", model, runs.grpo(5))
    assert train(other) == longer


def test_from_a_chosen_checkpoint(model, tmp_path):
    """`--resume PATH` goes back to an earlier checkpoint of the run, keeps later ones aside, and takes no other run's."""
    from rlrun.errors import ConfigError

    path = runs.write_run(tmp_path, model, runs.grpo(3), checkpoint={"every": 1})
    first = train(path)
    folder = tmp_path / "run" / "checkpoints"
    for aside in ("superseded-", "superseded-superseded-"):
        assert train(path, resume=str(folder / "step_000001")) == first
        assert {f"{aside}step_000002", f"{aside}step_000003", "step_000003"} <= set(runs.checkpoints(tmp_path / "run"))
    with pytest.raises(ConfigError, match="another run"):
        train(path, "run.name=other", resume=str(folder / "step_000001"))


def test_changed_data_are_refused_before_ranks_start(model, tmp_path, monkeypatch):
    """Case 50: a run cannot go on with other training data than it began with; that is told at once."""
    from rlrun import launch
    from rlrun.errors import ConfigError

    path = runs.write_run(tmp_path, model, runs.sft(1))
    train(path)
    runs.write_questions(tmp_path / "train.jsonl", 23)
    monkeypatch.setattr(launch, "start_ranks", None)
    with pytest.raises(ConfigError, match=r"training data changed.*\[24\] rows, now they have \[23\]"):
        train(path, "stages.0.steps=2")


@pytest.mark.slow
def test_two_ranks_become_one(model, tmp_path):
    """When 2 ranks become 1, prompts come in the same order, completions are the same at first, and the gathered weights
    and moments are bit-equal (numbers after an update differ by rounding alone)."""
    trainer, epochs = {"dump_rollouts_every": 1}, [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "t.jsonl", 12))}]
    paths = [runs.write_run(tmp_path / name, model, runs.grpo(6), trainer=trainer, resources=runs.ray(2), data={"train": epochs})
             for name in ("whole", "part")]
    assert runs.rl_run(paths[0]).returncode == 0
    assert runs.rl_run(paths[1], "stages.0.steps=3").returncode == 0
    done = runs.rl_run(paths[1], "resources.train_ranks=1", "resources.launcher=local")
    assert done.returncode == 0, done.stderr
    whole, part = map(completions, paths)
    assert [uids(whole[name]) for name in sorted(whole)] == [uids(part[name]) for name in sorted(part)]
    assert len(whole) == 6
    assert part["step_000004.jsonl"] == whole["step_000004.jsonl"]
    for row, other in zip(*(runs.comparable(runs.metrics(path.parent / "run")) for path in paths)):
        assert row.keys() == other.keys()
        if row["step"] <= 4:
            assert row == pytest.approx(other, rel=1e-5, abs=1e-5), row["step"]
