"""The suites that every plugin that spreads sequences passes."""

from __future__ import annotations

from rlrun.testing import plain
from rlrun.testing.contracts.attention import AttentionContract
from rlrun.testing.contracts.base import PluginContract


class TestPlugin(PluginContract):
    plugins = ["ulysses"]


class TestUlysses(AttentionContract):
    """Cases 55, 56, 57, 62: gradients, uneven micro-batches, labels at the cut, loss tokens on one rank alone or nowhere."""

    plugins = [plain.__file__, "ulysses"]
    backend = "plain"
    spread = {"ulysses": {"size": 2}}
    apart = {"ulysses": {"size": 1}}
