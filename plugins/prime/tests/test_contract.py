"""The suites that every plugin and algorithm passes."""

from __future__ import annotations

from rlrun.testing.contracts.algorithm import AlgorithmContract
from rlrun.testing.contracts.base import PluginContract


class TestPlugin(PluginContract):
    plugins = ["prime"]


class TestPrime(AlgorithmContract):
    plugins = ["prime"]
    algorithm = "prime"


class TestPrimeBefore(AlgorithmContract):
    plugins = ["prime"]
    algorithm = "prime"
    options = {"advantage": "grpo"}
    sections = {"prime": {"update": "before", "granularity": "whole"}}
