"""What an engine sees over a run: weights always new, memory asked for in the right order, nothing kept over sleep."""

from __future__ import annotations

import math
import weakref

import pytest
import runs
import torch
from locally import train

from rlrun.errors import RankError, RunError
from rlrun.rollout.hf import HfRollout

LARGE = {"optim": {"lr": 0.05, "schedule": "constant"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return runs.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def events(monkeypatch):
    """What is asked of the engine, in order. Sleep poisons its weights, as an engine that discards them would."""
    seen = []

    def noting(name):
        original = getattr(HfRollout, name)

        def noted(self, *args):
            seen.append((name, args[0] if name == "wake" else None))
            if name == "sleep":
                self.policy_version = -1
                for p in self.model.parameters():
                    p.data.fill_(math.nan)
            result = original(self, *args)
            seen.append((f"{name} done", None))
            return result

        monkeypatch.setattr(HfRollout, name, noted)

    for name in ("wake", "sleep", "load_weights", "generate"):
        noting(name)
    return seen


def test_weights_come_between_the_engines_two_demands(model, tmp_path, events):
    """Cases 32, 121: after every sleep the weights' memory is woken, filled, and only then the cache's; nothing is generated
    in between, and a sleep that poisons the weights changes no number."""
    path = runs.write_run(tmp_path / "a", model, validation={"at_start": True, "at_end": True, "every": 1},
                          data={"validation": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "v", 4, 30))}]})
    poisoned = train(path)
    names = [event for event in events if not event[0].endswith("done")]
    assert names[0][0] == "sleep", "the engine sleeps while models are built"
    state = "asleep"
    for name, tags in names:
        if name == "sleep":
            state = "asleep"
        elif name == "wake" and tags == ["weights"]:
            assert state in ("asleep", "awake")
            state = "weights"
        elif name == "load_weights":
            assert state == "weights"
            state = "loaded"
        elif name == "wake":
            assert (state, tags) == ("loaded", ["kv_cache"])
            state = "awake"
        else:
            assert (name, state) == ("generate", "awake")
    assert all(math.isfinite(row["actor/pg_loss"]) for row in poisoned if "actor/pg_loss" in row)
    assert any("val-core" in key for key in poisoned[-1])


def test_no_second_copy_of_the_model_is_staged(model, tmp_path, monkeypatch):
    """Case 121: while weights are loaded, no more than about a bucket of them is alive beside trainer and engine."""
    from rlrun_fsdp import sharding

    monkeypatch.setattr(sharding, "BUCKET_BYTES", 2000)
    original, most = HfRollout.load_weights, []

    def counted(self, weights, version):
        alive, sizes = [], []

        def watched():
            for name, tensor in weights:
                alive.append(weakref.ref(tensor))
                sizes.append(tensor.nbytes)
                most.append(sum(t.nbytes for t in (ref() for ref in alive) if t is not None))
                yield name, tensor
                del tensor

        original(self, watched(), version)
        most.append((max(sizes), sum(sizes)))

    monkeypatch.setattr(HfRollout, "load_weights", counted)
    train(runs.write_run(tmp_path / "a", model, runs.grpo(1)))
    largest, whole = most.pop()
    peak = max(x for x in most if not isinstance(x, tuple))
    assert peak <= 2 * (2000 + largest) < whole


@pytest.mark.parametrize("settings", [
    {}, {"fsdp": {"offload_params": True}}, {"fsdp": {"reshard_after_forward": False}}, {"fsdp": {"lora": {"rank": 2}}},
    {"model": {"gradient_checkpointing": True}}], ids=str)
def test_the_engine_follows_the_trainer(model, tmp_path, monkeypatch, settings):
    """Cases 31, 34: whatever is switched on, after each update with a large rate the engine's log-probabilities are the
    trainer's, and its weights are others than before."""
    original, sums = HfRollout.generate, []

    def summed(self, requests, params):
        sums.append(float(sum(p.detach().double().abs().sum() for p in self.model.parameters())))
        return original(self, requests, params)

    monkeypatch.setattr(HfRollout, "generate", summed)
    path = runs.write_run(tmp_path / "a", model, runs.grpo(4), rollout={"gap_fraction": 1.0}, actor=LARGE, **settings)
    rows = [row for row in train(path) if "rollout/gap_max" in row]
    assert len(rows) == 4
    assert max(row["rollout/gap_max"] for row in rows) < 1e-4
    assert len({round(x, 9) for x in sums}) == 4


def test_a_failed_load_is_no_version(model, tmp_path, monkeypatch):
    """Case 36: where a load fails half-way the run ends with its cause, and nothing counts as that version."""
    original, versions = HfRollout.load_weights, []

    def failing(self, weights, version):
        if version < 2:
            return original(self, weights, version)
        some = list(weights)[:3]
        try:
            return original(self, iter(some), version)
        finally:
            versions.append(self.policy_version)

    monkeypatch.setattr(HfRollout, "load_weights", failing)
    path = runs.write_run(tmp_path / "a", model)
    with pytest.raises((RankError, RunError, ValueError), match="did not send"):
        train(path)
    assert versions == [-1]
    assert [row["step"] for row in runs.metrics(tmp_path / "a/run")][-1] <= 2


def test_the_gap_can_end_a_run(model, tmp_path, monkeypatch):
    """An engine that is another policy than the trainer is found out, and ends the run where rollout.gap_limit says so."""
    original = HfRollout.load_weights

    def stale(self, weights, version):
        if version == 0:
            return original(self, weights, version)
        for _ in weights:
            pass
        self.policy_version = version
        return None

    monkeypatch.setattr(HfRollout, "load_weights", stale)
    path = runs.write_run(tmp_path / "a", model, actor=LARGE, rollout={"gap_fraction": 1.0, "gap_limit": 1e-3})
    with pytest.raises(RunError, match=r"rollout\.gap_limit"):
        train(path)
    assert torch.isfinite(torch.tensor(runs.metrics(tmp_path / "a/run")[-1]["rollout/gap_mean"]))
