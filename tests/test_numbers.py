"""On a recorded batch, neither ranks nor micro-batches nor the order of rows change what is learned or logged."""

from __future__ import annotations

import pytest
import runs
import torch
from locally import load
from safetensors.torch import load_file

from rlrun.testing.gloo import drive
from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401

KL_ENTROPY = {"kl_coef": 0.1, "entropy_coef": 0.05}
CASES = {
    "sft": {"name": "sft"},
    "sft seq_mean": {"name": "sft", "loss_aggregation": "seq_mean_token_mean"},
    "dpo": {"name": "dpo", "kl_coef": 0.5},
    "grpo": {"name": "grpo", **KL_ENTROPY},
    "grpo seq_mean_token_mean": {"name": "grpo", "loss_aggregation": "seq_mean_token_mean", **KL_ENTROPY},
    "grpo seq_mean_token_sum": {"name": "grpo", "loss_aggregation": "seq_mean_token_sum", **KL_ENTROPY},
    "rloo k2": {"name": "rloo", "kl_estimator": "k2", **KL_ENTROPY},
    "ppo": {"name": "ppo", "kl_in": "reward", "kl_estimator": "k1", "kl_target": 0.1, "kl_horizon": 50, **KL_ENTROPY},
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2: computes in float64 throughout, and its positions are not just relative."""
    return runs.write_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another policy, as reference: the KL to it is not 0."""
    return runs.write_model(tmp_path_factory.mktemp("other"), "gpt2", seed=1)


def recorded(groups=4, samples=4, dtype=torch.float64):
    """A batch as the collector hands it on; one completion is empty, prompts and completions have different lengths."""
    from rlrun.batch import Batch

    generator = torch.Generator().manual_seed(0)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    rows, prompts = [], []
    for group in range(groups):
        prompt = (2 + draw(256, 3 + group)).tolist()
        for sample in range(samples):
            n = 0 if (group, sample) == (1, 2) else 1 + int(draw(7))
            rows.append({"ids": [*prompt, *(2 + draw(256, n)).tolist()], "loss_mask": [False] * len(prompt) + [True] * n})
            prompts.append(len(prompt))
    total = sum(len(row["ids"]) for row in rows)
    batch = Batch.from_sequences(rows, {
        "uid": [f"q/{i // samples}" for i in range(len(rows))],
        "group": torch.arange(len(rows)) // samples,
        "pair": torch.arange(len(rows)) // 2,
        "preference": torch.arange(len(rows)) % 2,
        "reward": draw(5, len(rows)).to(dtype),
        "correct": draw(2, len(rows)).to(dtype),
        "data_source": ["q"] * len(rows),
        "finish_reason": ["stop" if i % 3 else "length" for i in range(len(rows))],
        "policy_version": torch.zeros(len(rows), dtype=torch.int64),
        "prompt_length": torch.tensor(prompts),
    })
    batch.tokens["rollout_log_probs"] = torch.randn(total, generator=generator, dtype=dtype) - 5.5
    batch.tokens["gap_mask"] = batch.tokens["loss_mask"] & (draw(2, len(rows)) > 0)[batch.sequence_ids]
    return batch


def train_on(workers, plugins, config, batch):
    """The trainer's own loop over all stages with `batch` in each step: metrics of each step, weights of each role."""
    import threading
    from pathlib import Path

    from rlrun.launch import Run
    from rlrun.trainer import Trainer

    class Recorded(Run):
        """A run without data, engine, trackers and checkpoints."""

        def __init__(self):
            super().__init__(config, plugins, Path("nowhere"), 0, threading.Event())
            workers.sync = workers.sleep = lambda *_: None
            self.workers, self.validation, self.tracked, self.sampler = workers, [], [], self
            self.epoch = 0.0

        def position(self):
            return {}

        def settle(self):
            pass

        def stage_steps(self, stage):
            return stage.steps

        def collector(self, stage, algorithm, position):
            return self

        def next(self, *_):
            return batch.select(range(len(batch))), {}

        def records(self):
            return []

        def save(self, state, background):
            pass

        def publish(self, wait):
            pass

        def track(self, step, metrics):
            self.tracked.append(metrics)

    run = Recorded()
    Trainer(run).train(None)
    return runs.comparable(run.tracked), {role: workers.call("weights", role)[0] for role in workers.roles}


def write(directory, gpt2, other, options, dtype="float64", per_update=4, epochs=1):
    algorithm = {"prompts_per_step": 4, "prompts_per_update": per_update, "epochs_per_step": epochs, **options}
    sgd = {"name": "sgd", "lr": 0.3, "clip_grad": 0.0}
    path = runs.write_run(
        directory, gpt2, {"algorithm": algorithm, "steps": 1}, model={"dtype": dtype}, ref={"path": str(other)},
        actor={"optim": sgd, "tokens_per_micro_batch": 512}, critic={"optim": sgd}, rollout={"temperature": 0.8},
        resources={"launcher": "auto"})
    return load(path)[0]


def moved(path, weights):
    before = load_file(path / "model.safetensors")
    return max(float((w - before[n]).norm() / before[n].norm()) for n, w in weights.items() if before[n].norm() > 0)


def assert_same(got, expected, tolerance):
    for rows, others in zip(got[0], expected[0], strict=True):
        assert rows.keys() == others.keys()
        for name, value in others.items():
            assert rows[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert got[1].keys() == expected[1].keys()
    for role, weights in expected[1].items():
        for name, value in weights.items():
            error = (got[1][role][name] - value).norm() / value.norm().clamp(min=1e-3)
            assert error < tolerance, (role, name, float(error))


@pytest.mark.parametrize("name", CASES)
def test_neither_ranks_nor_micro_batches_nor_order(name, gpt2, other, ranks1, ranks2, tmp_path):  # noqa: F811
    """Cases 82, 98: gradients, losses and all logged metrics of a step, in float64, with weights moved by 1% or more."""
    config = write(tmp_path, gpt2, other, CASES[name])
    batch = recorded(samples=2 if name == "dpo" else 4)
    expected = drive(ranks1, config, train_on, batch)
    assert moved(gpt2, expected[1]["actor"]) > 0.01
    if name == "ppo":
        assert float(expected[1]["critic"]["value_head.bias"].abs()) > 0.01
    config.actor.tokens_per_micro_batch = 30 if name == "dpo" else 17
    shuffled = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)))
    assert_same(drive(ranks1, config, train_on, shuffled), expected, 1e-9)
    assert_same(drive(ranks2, config, train_on, batch), expected, 1e-9)


def update(workers, plugins, config, batch, loss, atom="sequence"):
    """One update of a new actor: its metrics, and the weights."""
    from rlrun.metrics import results
    from rlrun.workers.protocol import RoleRequest

    actor = RoleRequest(True, config.model.path, config.model.dtype, optim=config.actor.optim)
    workers.build("actor", actor, 1, frozenset({"log_probs"}))
    metrics = results(workers.update("actor", batch, loss, batch.denominators(), config.rollout.temperature, atom))
    return [metrics], {"actor": workers.call("weights", "actor")[0]}


def spread(outputs, batch):
    """A loss that couples the samples of a group: the squares of each group's sum of log-probabilities."""
    from rlrun.workers.protocol import Term

    _, group = batch.sequences["group"].unique(return_inverse=True)
    sums = batch.sums(outputs["log_probs"])
    return {"loss": Term(torch.zeros(len(batch), dtype=sums.dtype).index_add(0, group, sums).square().sum(), "constant", 1e-5)}


def test_atoms_stay_whole(gpt2, other, ranks1, ranks2, tmp_path):  # noqa: F811
    """Cases 82, 98: a loss over whole groups gives the same update, on however many ranks and in however small micro-batches."""
    config, batch = write(tmp_path, gpt2, other, {"name": "grpo"}), recorded()
    expected = drive(ranks1, config, update, batch, spread, "group")
    assert moved(gpt2, expected[1]["actor"]) > 0.01
    config.actor.tokens_per_micro_batch = int(max(batch.lengths.view(4, 4).sum(1)))
    for ranks in (ranks1, ranks2):
        assert_same(drive(ranks, config, update, batch, spread, "group"), expected, 1e-9)
    config.actor.tokens_per_micro_batch = 17
    with pytest.raises(Exception, match=r"17"):
        drive(ranks1, config, update, batch, spread, "group")


def test_sft_is_at_temperature_one(gpt2, other, ranks1, tmp_path):  # noqa: F811
    """What the engine samples with does not change the likelihood that supervised training maximises."""
    config, batch = write(tmp_path, gpt2, other, {"name": "sft"}), recorded()
    assert config.rollout.temperature == 0.8
    at_08 = drive(ranks1, config, train_on, batch)
    config.rollout.temperature = 1.0
    assert_same(at_08, drive(ranks1, config, train_on, batch), 1e-12)


def test_what_is_not_finite_counts_once(gpt2, other, ranks2, tmp_path):  # noqa: F811
    """Case 100: a NaN that all ranks report counts as one; a term without anything to divide by is left out."""
    from rlrun.algorithms.losses import PolicyLoss

    config, batch = write(tmp_path, gpt2, other, {"name": "grpo"}), recorded()
    batch.tokens["advantages"] = torch.full_like(batch.tokens["rollout_log_probs"], torch.nan)
    batch.tokens["gap_mask"][:] = False
    [metrics], _ = drive(ranks2, config, update, batch, PolicyLoss(0.2, 0.2, "token_mean"))
    assert {k: v for k, v in metrics.items() if "nonfinite" in k} == {"nonfinite/actor/pg_loss": 1, "nonfinite/grad_norm": 1}
    assert metrics["skipped"] == 1
    assert "actor/ppo_kl" in metrics
    assert "rollout/gap_mean" not in metrics


def test_several_updates_a_step(gpt2, other, ranks1, ranks2, tmp_path):  # noqa: F811
    """Cases 82, 98: 4 updates of 2 prompts each; from the second one on the ratio is not 1, and clips."""
    config = write(tmp_path, gpt2, other, {"name": "ppo", **KL_ENTROPY}, per_update=2, epochs=2)
    batch = recorded()
    expected = drive(ranks1, config, train_on, batch)
    metrics = expected[0][0]
    assert metrics["actor/pg_clipfrac"] > 0.01
    assert abs(metrics["actor/ppo_kl"]) > 1e-3
    config.actor.tokens_per_micro_batch = 17
    assert_same(drive(ranks2, config, train_on, batch), expected, 1e-9)


def test_ragged_last_mini_batch(gpt2, other, ranks1, tmp_path):  # noqa: F811
    """Where groups were dropped the last mini-batch has fewer: 3 prompts by 2 make two updates, the second of one."""
    config = write(tmp_path, gpt2, other, {"name": "grpo"}, per_update=2)
    assert drive(ranks1, config, count_updates, recorded(3)) == [8, 4]


def count_updates(workers, plugins, config, batch):
    sizes, update = [], workers.update

    def counted(role, mini, *args):
        sizes.append(len(mini))
        return update(role, mini, *args)

    workers.update = counted
    train_on(workers, plugins, config, batch)
    return sizes


def test_float32(gpt2, other, ranks1, ranks2, tmp_path):  # noqa: F811
    """Cases 82, 98: the same in float32, to 1e-5."""
    config = write(tmp_path, gpt2, other, {"name": "grpo", **KL_ENTROPY}, dtype="float32")
    batch = recorded(dtype=torch.float32)
    expected = drive(ranks1, config, train_on, batch)
    config.actor.tokens_per_micro_batch = 17
    assert_same(drive(ranks2, config, train_on, batch), expected, 1e-5)
