"""What core itself provides passes the suites for plugin authors; the suites notice what is wrong, and cannot be weakened."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlrun.algorithms.presets import PRESETS
from rlrun.errors import PluginError
from rlrun.rewards.protocol import RewardItem
from rlrun.testing.contracts.algorithm import AlgorithmContract
from rlrun.testing.contracts.base import PluginContract
from rlrun.testing.contracts.reward import RewardContract
from rlrun.testing.contracts.rollout import RolloutContract
from rlrun.testing.contracts.tracker import TrackerContract
from rlrun.testing.fakes import FakeEngine, recorded_hooks

OPTIONS = {"grpo": {"kl_coef": 0.1, "kl_estimator": "k3_unbiased", "entropy_target": 0.5},
           "pass_at_k": {"pass_k": 1},
           "rloo": {"kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.1, "correction": "token_tis"}}


class TestBuiltin(PluginContract):
    plugins = []


for name in [*PRESETS, "sft", "dpo"]:
    globals()[f"Test_{name}"] = type(f"Test_{name}", (AlgorithmContract,), {
        "__module__": __name__, "plugins": [], "algorithm": name, "options": OPTIONS.get(name, {}),
        "per_group": name in PRESETS and PRESETS[name]["advantage"] in ("grpo", "rloo", "opo", "pass_at_k")})


class TestHf(RolloutContract):
    """Cases 23, 25, 28, 29, 30, 35, 36."""

    plugins = []
    engine = "hf"


class TestMathVerify(RewardContract):
    plugins = []
    reward = "math_verify"
    examples = [(RewardItem("1/2?", rf"\boxed{{{said}}}", "1/2", "test"), score) for said, score in (("0.5", 1.0), ("2", 0.0))]


class TestTensorBoard(TrackerContract):
    plugins = []
    tracker = "tensorboard"

    @staticmethod
    def read(run_dir):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
        return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


WRONG = '''
import torch
from rlrun.algorithms.policy_gradient import PolicyAlgorithm
from rlrun.hookspecs import PluginInfo, hookimpl
from rlrun.workers.protocol import Term


@hookimpl
def plugin_info():
    return PluginInfo(name="wrong", api_version=1, provides={
        "algorithm": {name: f"wrong:{name.capitalize()}" for name in ("position", "leaks", "mean", "forgets", "local", "blind")},
        "reward": {"counts": "wrong:Counts"}, "tracker": {"twice": "wrong:Twice"}})


@hookimpl
def compute_metrics(step):
    return {"wrong/metric": 1.0}


class Position(PolicyAlgorithm):
    """Groups by place."""
    def estimate(self, batch, totals):
        means = totals.view(-1, 2).mean(1).repeat_interleave(2)
        return (totals - means)[batch.sequence_ids] * batch.tokens["loss_mask"]


class Leaks(PolicyAlgorithm):
    """Multiplies by the mask."""
    def estimate(self, batch, totals):
        return totals[batch.sequence_ids] + (batch.tokens["log_probs"] * batch.tokens["loss_mask"]).mean()


class Blind(PolicyAlgorithm):
    """Looks at no group."""
    def estimate(self, batch, totals):
        return (totals - totals.mean())[batch.sequence_ids] * batch.tokens["loss_mask"]


class Loss:
    def __call__(self, outputs, batch):
        mask = batch.tokens["loss_mask"]
        return {"loss": Term(-(outputs["log_probs"] * batch.tokens["advantages"])[mask].mean(), "constant", 1.0)}


class Mean(PolicyAlgorithm):
    """A mean over the micro-batch, where a sum is asked for."""
    def losses(self, step):
        return {"actor": Loss()}


class Forgets(PolicyAlgorithm):
    seen = 0
    def advantages(self, batch):
        self.seen += len(batch)
        return super().advantages(batch)
    def state_dict(self):
        return super().state_dict() | {"seen": self.seen}


class Local(PolicyAlgorithm):
    def losses(self, step):
        return {"actor": lambda outputs, batch: Loss()(outputs, batch)}


class Counts:
    calls = 0
    def __call__(self, item):
        self.calls += 1
        return float(self.calls)


class Twice:
    """Appends, whatever step a run goes on from."""
    def __init__(self, run_dir, total_steps, resumed_step):
        self.file = (run_dir / "log").open("a")
    def log(self, metrics, step):
        for name, value in metrics.items():
            self.file.write(f"{step} {value} {name}\\n")
    def close(self):
        self.file.close()
'''


@pytest.fixture
def wrong(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    return str(tmp_path / "wrong.py")


def suite(contract, plugin, **given):
    return type("Wrong", (contract,), {"__module__": __name__, "plugins": [plugin], **given})()


@pytest.mark.parametrize("name, test", [
    ("position", "test_advantages"), ("leaks", "test_advantages"), ("mean", "test_losses"), ("forgets", "test_state"),
    ("local", "test_losses"), ("blind", "test_groups"),
])
def test_wrong_algorithms_fail(wrong, name, test):
    with pytest.raises((AssertionError, AttributeError)):
        getattr(suite(AlgorithmContract, wrong, algorithm=name, per_group=True), test)()


def test_wrong_rewards_and_trackers_fail(wrong, tmp_path):
    items = [(RewardItem("q", "a", "", "test"), 1.0), (RewardItem("q", "b", "", "test"), 2.0)]
    counts = suite(RewardContract, wrong, reward="counts", examples=items)
    pool = counts.make()
    with pytest.raises(AssertionError):
        counts.test_scores(pool)
    pool.close()

    def read(run_dir):
        rows = [line.split() for line in (run_dir / "log").read_text().splitlines()]
        return {name: [(int(step), float(value)) for step, value, n in rows if n == name] for _, _, name in rows}

    twice = suite(TrackerContract, wrong, tracker="twice", read=staticmethod(read))
    twice.test_numbers_arrive(tmp_path)
    (tmp_path / "log").unlink()
    with pytest.raises(AssertionError):
        twice.test_resume(tmp_path)


class Lenient:
    def test_losses(self):
        """Passes always."""


@pytest.mark.parametrize("bases, given, said", [
    ((AlgorithmContract,), {"test_losses": lambda self: None}, "Mine.test_losses overrides AlgorithmContract.test_losses"),
    ((Lenient, AlgorithmContract), {}, "Lenient.test_losses overrides"),
    ((AlgorithmContract,), {"batch": lambda self, fill=0.0: None}, "Mine.batch overrides"),
    ((AlgorithmContract,), {"test_state": None}, "only: algorithm, options, per_group, plugins, sections"),
])
def test_a_suite_cannot_be_weakened(bases, given, said):
    """Neither by overriding, nor by a base beside the suite."""
    with pytest.raises(TypeError, match=said):
        type("Mine", bases, {"__module__": __name__, "plugins": [], "algorithm": "grpo", **given})


def test_a_suite_cannot_be_hidden():
    with pytest.raises(TypeError, match="Mine.__test__ hides the tests of AlgorithmContract"):
        type("Mine", (AlgorithmContract,), {"__module__": __name__, "plugins": [], "algorithm": "grpo", "__test__": False})


LATE = '''
from rlrun.testing.contracts.algorithm import AlgorithmContract

class Deaf:
    def __init_subclass__(cls):
        pass

class TestLate(AlgorithmContract):
    plugins, algorithm = [], "grpo"

class TestDeaf(Deaf, AlgorithmContract):
    plugins, algorithm = [], "grpo"
    def test_losses(self):
        pass

TestLate.test_losses = lambda self: None
'''


@pytest.mark.slow
def test_a_suite_cannot_be_weakened_later(tmp_path):
    """Nor once the class is made, nor by a base that keeps the suite from looking: no test of it passes then."""
    (tmp_path / "test_late.py").write_text(LATE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    for name in ("Late", "Deaf"):
        assert f"Test{name}.test_losses overrides AlgorithmContract.test_losses" in done.stdout
    assert " passed" not in done.stdout, done.stdout


def test_what_must_be_given():
    with pytest.raises(TypeError, match="Mine must give examples, plugins, reward"):
        type("Mine", (RewardContract,), {"__module__": __name__})


def test_hooks_are_recorded(wrong):
    from types import SimpleNamespace

    from rlrun.plugins import Plugins

    plugins = Plugins.load([wrong])
    with recorded_hooks(plugins) as calls:
        plugins.compute_metrics(SimpleNamespace(metrics={}))
        with pytest.raises(PluginError):
            plugins.compute_metrics(SimpleNamespace(metrics={"wrong/metric": 0.0}))
    plugins.compute_metrics(SimpleNamespace(metrics={}))
    assert [(name, list(arguments)) for name, arguments in calls] == [("compute_metrics", ["step"])] * 2


def test_the_fake_engine():
    from rlrun.rollout.protocol import Request, SamplingParams

    engine = FakeEngine(None, None, 0)
    asked = [Request(5, (1, 2), "key")]
    with pytest.raises(RuntimeError, match="before any weights"):
        engine.generate(asked, SamplingParams(1.0, 4, (1,)))
    engine.load_weights(iter([]), 3)
    [whole], [cut] = (engine.generate(asked, SamplingParams(1.0, limit, (1,))) for limit in (4, 2))
    assert (whole.index, whole.ids, whole.finish_reason, whole.policy_version) == (5, (2, 3, 1), "stop", 3)
    assert (cut.ids, cut.finish_reason) == ((2, 3), "length")
