"""GRPO that prefers short answers. This module is imported by every `rl-run` that lists the plugin: keep it light."""

from __future__ import annotations

from dataclasses import dataclass

from rlrun.config.schema import opt
from rlrun.hookspecs import PluginInfo, Step, hookimpl


@dataclass
class BrevityConfig:
    penalty: float = opt(0.1, "taken from the reward of a completion of rollout.max_new_tokens, less from shorter ones", ge=0)


@hookimpl
def plugin_info() -> PluginInfo:
    return PluginInfo(
        name="brevity", api_version=1, config=BrevityConfig,
        provides={"algorithm": {"brevity": "rlrun_brevity.algorithm:Brevity"},
                  "reward": {"short": "rlrun_brevity.reward:Short"}},
    )


@hookimpl
def compute_metrics(step: Step) -> dict[str, float]:
    lengths = step.batch.loss_lengths().double()
    return {"brevity/length_std": float(lengths.std())}
