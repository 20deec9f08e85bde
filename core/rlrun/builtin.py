"""What core itself provides, through the same door as any plugin."""

from rlrun.algorithms.presets import OFFLINE, PRESETS
from rlrun.hookspecs import PluginInfo, hookimpl


@hookimpl
def plugin_info() -> PluginInfo:
    return PluginInfo(
        name="builtin",
        api_version=1,
        presets=PRESETS | OFFLINE,
        provides={
            "source": {"jsonl": "rlrun.data.sources:Jsonl", "parquet": "rlrun.data.sources:Parquet",
                       "datasets": "rlrun.data.sources:Datasets", "reasoning_gym": "rlrun.data.sources:ReasoningGym"},
            "reward": {"function": "rlrun.rewards.function:FunctionReward", "model": "rlrun.rewards.model:RewardModel",
                       "reasoning_gym": "rlrun.rewards.reasoning_gym:ReasoningGymReward",
                       "math_verify": "rlrun.rewards.math_verify:MathVerifyReward"},
            "environment": {"reasoning_gym": "rlrun.rewards.reasoning_gym:ReasoningGymEnvironment"},
            "tracker": {"console": "rlrun.trackers.console:Console", "tensorboard": "rlrun.trackers.tensorboard:TensorBoard",
                        "wandb": "rlrun.trackers.wandb:Wandb", "mlflow": "rlrun.trackers.mlflow:Mlflow"},
            "algorithm": {**dict.fromkeys(PRESETS, "rlrun.algorithms.policy_gradient:PolicyAlgorithm"),
                          "sft": "rlrun.algorithms.sft:Sft", "dpo": "rlrun.algorithms.dpo:Dpo"},
            "rollout": {"hf": "rlrun.rollout.hf:HfRollout", "vllm": "rlrun.rollout.vllm:VllmRollout"},
        },
    )
