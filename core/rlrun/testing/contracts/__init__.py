"""The contract kit: suites that a plugin's tests subclass, one for each kind of thing that a plugin provides.

A subclass gives what the suite annotates (`plugins`, the name that is tested, perhaps options), and pytest does the rest:

    from rlrun.rewards.protocol import RewardItem
    from rlrun.testing.contracts.reward import RewardContract

    class TestShort(RewardContract):
        plugins = ["brevity"]
        reward = "short"
        examples = [(RewardItem("question", "12345678", "", "test"), 0.5)]

Needs the extra `rlrun[testing]`. Tests, fixtures and tolerances of a suite cannot be overridden."""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in (
    "algorithm", "attention", "backend", "base", "reward", "rollout", "tracker")))
