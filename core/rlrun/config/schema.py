"""Every key of a run's configuration: name, type, default, meaning, and the values it accepts.

The dataclasses become OmegaConf structured configs, so unknown keys and wrong types fail on loading. What a single
value may be stands here, beside the key (`opt`); what combinations of values may be stands in `validate.py`."""

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar

from omegaconf import MISSING

Section = TypeVar("Section")


def opt(default: Any = NO_DEFAULT, help: str = "", *, choices: tuple[str, ...] = (), gt: float | None = None,
        ge: float | None = None, lt: float | None = None, le: float | None = None) -> Any:
    """A config key: its default (dicts and lists are copied for each instance), meaning, and accepted values.

    Numbers are always required to be finite. `None` passes every check of an Optional key."""
    limits = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata = {"help": help, "choices": choices, **{k: v for k, v in limits.items() if v is not None}}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    name: str = opt(MISSING, "the run's name: its folder under run.dir")
    dir: str = opt("runs", "where run folders lie")
    seed: int = opt(0, "seed of every random stream: data order, sampling, initialisation", ge=0)


@dataclass
class ModelConfig:
    path: str = opt(MISSING, "folder of the policy model, as save_pretrained writes it")
    tokenizer: Optional[str] = opt(None, "folder of the tokenizer; default: model.path")
    dtype: str = opt("bfloat16", "compute dtype; parameters that train are kept in float32",
                     choices=("bfloat16", "float32", "float64"))
    gradient_checkpointing: bool = opt(False, "recompute each decoder layer in the backward pass")


@dataclass
class SourceConfig:
    kind: str = opt(MISSING, "jsonl, parquet, datasets, reasoning_gym, or a source of a listed plugin")
    path: str = opt(MISSING, "file or folder; for reasoning_gym the dataset's name")
    name: Optional[str] = opt(None, "data_source in metrics, where rows have none; default: the path's stem")
    weight: float = opt(1.0, "share of this source among the training sources; validation sources are used whole", gt=0)
    prompt_key: str = opt("prompt", "column with the prompt: a string or a list of chat messages")
    answer_key: str = opt("answer", "column with the reference answer (dots reach into nested columns)")
    options: dict[str, Any] = opt({}, "options of the source, as its library names them (such as size, seed)")


@dataclass
class DataConfig:
    train: list[SourceConfig] = opt([], "training sources")
    validation: list[SourceConfig] = opt([], "validation sources; their prompts leave the training data")
    max_prompt_tokens: int = opt(1024, "longest prompt, after the chat template", gt=0)
    overlong_prompts: str = opt("drop", "what happens to longer ones", choices=(
        "drop", "error", "truncate_left", "truncate_right", "truncate_middle"))
    shuffle: bool = opt(True, "shuffle each source anew in every epoch, keyed by run.seed")


@dataclass
class RolloutConfig:
    engine: str = opt("hf", "rollout engine: hf, vllm, or one of a listed plugin")
    engine_args: dict[str, Any] = opt({}, "options of the engine: vllm's under its own names; hf knows max_num_seqs")
    samples_per_prompt: int = opt(8, "completions of each prompt (a group)", gt=0)
    max_new_tokens: int = opt(1024, "longest completion", gt=0)
    temperature: float = opt(1.0, "sampling temperature; the trainer's log-probabilities use it too", gt=0)
    top_p: float = opt(1.0, "nucleus sampling; below 1 only with an off-policy correction", gt=0, le=1)
    top_k: int = opt(0, "sample among the k likeliest tokens; 0: all", ge=0)
    stop: list[str] = opt([], "strings that end a completion")
    max_staleness: int = opt(0, "1: generate a step's samples while the step before trains (needs resources.rollout_ranks "
                             "and an off-policy correction)", ge=0, le=1)
    tokens_per_round: Optional[int] = opt(None, "most tokens of a completion drawn in one generation round; a longer one goes on "
                                                "in the next round or step (partial rollouts)", gt=0)
    gap_fraction: float = opt(0.0625, "share of samples whose engine log-probabilities are compared with the trainer's",
                              ge=0, le=1)
    gap_limit: Optional[float] = opt(None, "mean of these differences per token at which the run ends", gt=0)


@dataclass
class RewardPart:
    kind: str = opt(MISSING, "a reward of a listed plugin or a built-in one: function, reasoning_gym, math_verify, model")
    weight: float = opt(1.0, "factor in the weighted sum")
    kwargs: dict[str, Any] = opt({}, "arguments of the reward's constructor")


@dataclass
class RewardConfig:
    kind: Optional[str] = opt(None, "the reward, where there is one; see reward.parts for several")
    kwargs: dict[str, Any] = opt({}, "arguments of the reward's constructor")
    parts: list[RewardPart] = opt([], "several rewards, added up with weights; each is logged")
    timeout_s: float = opt(10.0, "longest time for one sample, in seconds", gt=0)
    on_error: str = opt("zero", "an exception or time-out gives reward 0, drops the sample, or ends the run",
                        choices=("zero", "drop", "raise"))
    processes: int = opt(1, "scoring processes", gt=0)


@dataclass
class EnvironmentConfig:
    name: Optional[str] = opt(None, "reasoning_gym, or an environment of a listed plugin; default: a single turn")
    max_turns: int = opt(8, "most replies of the policy to one prompt; together with what the environment says they end at "
                            "data.max_prompt_tokens + rollout.max_new_tokens", gt=0)
    kwargs: dict[str, Any] = opt({}, "arguments of the environment's constructor")


@dataclass
class OptimConfig:
    lr: float = opt(1e-6, "peak learning rate", gt=0)
    betas: list[float] = opt([0.9, 0.999], "AdamW's decay rates")
    eps: float = opt(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = opt(0.01, "AdamW's decoupled weight decay", ge=0)
    clip_grad: float = opt(1.0, "largest norm of the full gradient; 0: no clipping", ge=0)
    schedule: str = opt("constant", "learning rate over a stage's updates", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = opt(0, "updates of linear warm-up", ge=0)
    decay_fraction: float = opt(0.1, "wsd: share of the updates in the final decay", gt=0, le=1)
    min_lr_ratio: float = opt(0.0, "floor of the schedule, as a share of lr", ge=0, le=1)
    name: str = opt("adamw", "sgd is for comparing gradients", choices=("adamw", "sgd"))


@dataclass
class ActorConfig:
    backend: str = opt("fsdp", "training backend, of a listed plugin")
    optim: OptimConfig = field(default_factory=OptimConfig)
    tokens_per_micro_batch: int = opt(16384, "most tokens in one forward pass of one rank, prompts included", gt=0)


@dataclass
class RefConfig:
    path: Optional[str] = opt(None, "folder of the reference model; default: the policy at the start of the stage")


@dataclass
class CriticConfig:
    path: Optional[str] = opt(None, "folder of the critic's initial model; default: the policy at the stage's start")
    optim: Optional[OptimConfig] = opt(None, "the critic's optimizer, whole; default: actor.optim")


@dataclass
class AlgorithmConfig:
    name: str = opt("grpo", "a preset that sets some of the fields below (docs/algorithms.md: grpo, dr_grpo, dapo, gspo, cispo, "
                            "rloo, reinforce_pp, reinforce_pp_baseline, remax, opo, pass_at_k, ppo), sft, dpo, or an algorithm "
                            "of a listed plugin")
    prompts_per_step: int = opt(64, "prompts (sft, dpo: rows) of one step", gt=0)
    prompts_per_update: Optional[int] = opt(None, "prompts of one optimizer step; default: prompts_per_step", gt=0)
    filter_groups: bool = opt(False, "drop prompts whose samples all have the same reward, and draw others")
    max_rounds: int = opt(8, "generation rounds to fill a step, where groups are dropped", gt=0)
    on_empty: str = opt("skip", "a step with nothing to train on after max_rounds is skipped and counted, or ends the run",
                        choices=("skip", "stop"))
    epochs_per_step: int = opt(1, "times that a step's samples are trained on", gt=0)
    advantage: str = opt("grpo", "how rewards become advantages; gae has a critic", choices=(
        "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "pass_at_k", "gae"))
    scale_rewards: bool = opt(True, "grpo: divide by the group's standard deviation")
    pass_k: int = opt(4, "pass_at_k: the best of so many samples is what counts", gt=0)
    gamma: float = opt(1.0, "gae, reinforce_pp: discount", gt=0, le=1)
    lam: float = opt(0.95, "gae: lambda", ge=0, le=1)
    overlong_buffer: int = opt(0, "last tokens before max_new_tokens over which the reward falls by 1; 0: none", ge=0)
    mask_truncated: bool = opt(False, "leave samples that hit max_new_tokens out of the losses")
    loss: str = opt("ppo_clip", "the policy loss", choices=("ppo_clip", "gspo", "cispo", "policy_gradient"))
    clip_low: float = opt(0.2, "the policy ratio is clipped at 1 - clip_low", gt=0, le=1)
    clip_high: float = opt(0.2, "and at 1 + clip_high", gt=0)
    dual_clip: Optional[float] = opt(None, "ppo_clip, gspo: losses of negative advantages end at this ratio", gt=1)
    loss_aggregation: str = opt("token_mean", "how token losses become one number", choices=(
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_constant"))
    correction: str = opt("none", "for samples whose engine log-probabilities differ from the trainer's", choices=(
        "none", "token_tis", "sequence_tis", "sequence_reject"))
    correction_cap: float = opt(2.0, "largest importance weight; sequence_reject: largest ratio, or its inverse", gt=1)
    kl_coef: float = opt(0.0, "weight of the KL to the reference model, dpo's beta; 0: no reference model", ge=0)
    kl_in: str = opt("loss", "where the KL goes", choices=("loss", "reward"))
    kl_estimator: str = opt("k3_unbiased", "estimator of the KL (Schulman 2020)", choices=("k1", "k2", "k3", "k3_unbiased"))
    kl_target: Optional[float] = opt(None, "adapt kl_coef towards this KL per token; default: fixed", gt=0)
    kl_horizon: int = opt(10000, "sequences over which an adaptive kl_coef moves", gt=0)
    entropy_coef: float = opt(0.0, "weight of the entropy bonus", ge=0)
    entropy_target: Optional[float] = opt(None, "adapt entropy_coef towards this entropy per token; default: fixed", gt=0)
    value_clip: float = opt(0.2, "gae: values are clipped to this distance from the old ones", gt=0)
    critic_warmup_steps: int = opt(0, "gae: first steps, in which only the critic trains", ge=0)


@dataclass
class StageConfig:
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    steps: Optional[int] = opt(None, "steps of this stage", gt=0)
    epochs: Optional[int] = opt(None, "or passes over the training data", gt=0)
    optim: Optional[OptimConfig] = opt(None, "the actor's optimizer in this stage, whole; default: actor.optim")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the actor in one step of a stage."""
        per_update = self.algorithm.prompts_per_update or self.algorithm.prompts_per_step
        return self.algorithm.prompts_per_step // per_update * self.algorithm.epochs_per_step


@dataclass
class ValidationConfig:
    every: int = opt(0, "steps between validations; 0: only as the next two keys say", ge=0)
    at_start: bool = opt(True, "validate before the first step")
    at_end: bool = opt(True, "validate after the last step")
    samples_per_prompt: int = opt(1, "completions of each question: n of mean@n, best@n, maj@n", gt=0)
    temperature: float = opt(0.0, "0: greedy", ge=0)
    top_p: float = opt(1.0, "nucleus sampling", gt=0, le=1)


@dataclass
class TrainerConfig:
    phase_timeout_s: float = opt(1800.0, "a phase longer than this is hung: stacks are dumped, the run ends", gt=0)
    max_skipped_updates: int = opt(5, "updates in a row with a non-finite gradient before the run ends", gt=0)
    dump_rollouts_every: int = opt(0, "steps between dumps of all samples to rollouts/; 0: none", ge=0)
    trackers: list[str] = opt(["console", "tensorboard"], "where metrics go besides metrics.jsonl")


@dataclass
class CheckpointConfig:
    every: int = opt(0, "steps between checkpoints; the last step is always saved", ge=0)
    keep: Optional[int] = opt(3, "newest checkpoints that stay; null: all", gt=0)
    async_save: bool = opt(False, "train on while a checkpoint is written; it takes a copy in host memory")
    save_contents: list[str] = opt(["model", "optimizer", "extra", "hf_model"], "parts that a checkpoint holds")
    load_contents: list[str] = opt(["model", "optimizer", "extra"], "parts that a resumed run takes")


@dataclass
class ResourcesConfig:
    train_ranks: int = opt(1, "ranks that train, one a device", gt=0)
    rollout_ranks: int = opt(0, "further ranks that only generate; 0: those that train do both, in turn", ge=0)
    device: str = opt("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    launcher: str = opt("auto", "local runs one rank in the driver's process; auto: ray", choices=("auto", "ray", "local"))
    ray_address: Optional[str] = opt(None, "a running cluster; default: a local one for this run")
    threads_per_rank: int = opt(1, "CPU threads of each rank on device cpu", gt=0)


@dataclass
class Config:
    """The whole configuration. Plugins that define a config class add a section under their own name."""

    plugins: list[str] = opt([], "plugins in the order in which their hooks run")
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    @property
    def rewarded(self) -> bool:
        """Whether anything says how good a completion is."""
        return bool(self.reward.kind or self.reward.parts or self.environment.name)

    stages: list[StageConfig] = opt([], "stages in order; the global step goes on, optimizer and schedule restart")
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)

    def section(self, name: str, kind: type[Section]) -> Section:
        """A plugin's own section. Raises ValueError where the plugin is not listed."""
        value = getattr(self, name, None)
        if not isinstance(value, kind):
            raise ValueError(f"no section {name!r} of {kind.__name__} in this config: is plugin {name!r} listed?")
        return value
