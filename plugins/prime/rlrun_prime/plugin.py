"""Entry module of PRIME: its section of the configuration and its hooks. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from rlrun.config.schema import OptimConfig, opt
from rlrun.hookspecs import API_VERSION, PluginInfo, Step, hookimpl


def _optim() -> OptimConfig:
    return OptimConfig(lr=1e-6, weight_decay=0.0, clip_grad=10.0)


@dataclass
class PrimeConfig:
    beta: float = opt(0.05, "a token's process reward is beta * (log-probability under the reward model - under its reference)",
                      gt=0)
    path: Optional[str] = opt(None, "folder of the reward model as it starts; default: the policy at the stage's start")
    reference: str = opt("sft", "sft: a frozen model; policy: the policy before the step's updates, and one model less",
                         choices=("sft", "policy"))
    reference_path: Optional[str] = opt(None, "sft: folder of the frozen reference; default: the reward model as it starts")
    optim: OptimConfig = field(default_factory=_optim)
    loss: str = opt("ce", "what the reward model learns by: cross-entropy of each sample, or pairs of a prompt's samples",
                    choices=("ce", "dpo"))
    update: str = opt("after", "the reward model is updated after it scored a step's samples, before (and scores anew), or not",
                      choices=("after", "before", "none"))
    granularity: str = opt("token", "where process rewards stand: on tokens, at the ends of segments, or at the end",
                           choices=("token", "segment", "whole"))
    delimiter: str = opt("\n\n", "segment: text that ends one")
    advantage: str = opt("paper", "the paper's equations; or as its code has them: rloo's rewards scaled, all normalised",
                         choices=("paper", "reference"))
    process_coef: float = opt(1.0, "factor of the process rewards' part of the advantages", ge=0)
    outcome_coef: float = opt(1.0, "factor of the outcome rewards' part", ge=0)
    warmup_steps: int = opt(0, "first steps, in which the reward model learns, and outcomes alone reward", ge=0)
    accuracy_range: list[float] = opt([0.2, 0.8], "prompts whose samples' mean accuracy is outside are dropped, others drawn")
    drop_truncated: bool = opt(True, "likewise prompts with a sample that hit rollout.max_new_tokens")
    oversample: float = opt(1.0, "prompts drawn in a round, over those that are missing", ge=1)
    leftovers: str = opt("drop", "prompts drawn beyond the step's need: dropped, or first in the next step (needs a correction)",
                         choices=("drop", "keep"))


@hookimpl
def plugin_info() -> PluginInfo:
    return PluginInfo(name="prime", api_version=API_VERSION, config=PrimeConfig,
                      provides={"algorithm": {"prime": "rlrun_prime.algorithm:Prime"}}, presets={"prime": {"advantage": "rloo"}})


@hookimpl
def compute_metrics(step: Step) -> dict[str, float]:
    """What the reward model says of a step's samples, as it was before the step's updates, and after them where it is known."""
    from rlrun_prime.rewards import COLUMNS, agreement

    sequences = step.batch.sequences
    return {f"prime/{when}/{name}": value for when, column in COLUMNS.items() if column in sequences
            for name, value in agreement(sequences[column], sequences["correct"], sequences["group"]).items()}
