"""rlrun's suites for plugins, and what is special about this one."""

import pytest

from rlrun.rewards.protocol import RewardItem
from rlrun.testing.contracts.algorithm import AlgorithmContract
from rlrun.testing.contracts.base import PluginContract
from rlrun.testing.contracts.reward import RewardContract


class TestPlugin(PluginContract):
    plugins = ["brevity"]


class TestBrevity(AlgorithmContract):
    plugins = ["brevity"]
    algorithm = "brevity"
    sections = {"rollout": {"max_new_tokens": 8}, "brevity": {"penalty": 0.5}}

    def test_penalty(self):
        """A completion that is as long as it may be loses `brevity.penalty`."""
        before = self.batch()
        _, after, metrics = self.scored(self.batch())
        shares = before.loss_lengths() / 8
        assert after.sequences["reward"].tolist() == pytest.approx((before.sequences["reward"] - 0.5 * shares).tolist())
        assert metrics["brevity/share"] == pytest.approx(float(shares.mean()))


class TestShort(RewardContract):
    plugins = ["brevity"]
    reward = "short"
    kwargs = {"characters": 2}
    examples = [(RewardItem("3+4=", said, "7", "test"), score) for said, score in (("7", 1.0), ("it is 7.", 0.25))]
