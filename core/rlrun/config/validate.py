"""What values may be, alone and together. Problems are found before any model is loaded, and told all at once."""

import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from rlrun.algorithms.presets import GROUPED
from rlrun.config.schema import AlgorithmConfig, Config, OptimConfig, StageConfig
from rlrun.errors import ConfigError
from rlrun.plugins import Plugins
from rlrun.workers.profile import profile_of

_LIMITS = {
    "gt": (lambda value, limit: value > limit, "greater than"),
    "ge": (lambda value, limit: value >= limit, "at least"),
    "lt": (lambda value, limit: value < limit, "less than"),
    "le": (lambda value, limit: value <= limit, "at most"),
}

_OFFLINE = ("sft", "dpo")  # core's algorithms that generate nothing


def validate(config: Config, plugins: Plugins) -> None:
    """Check single values, combinations, and that every chosen name exists. Raises ConfigError with all problems.

    Loads no library: what depends on the chosen classes is checked by `validate_resolved`."""
    problems = list(_single(config, ""))
    if not problems:  # combinations of values that are wrong alone would only repeat that
        problems = [*_names(config, plugins), *_sections(config)]
        for i, stage in enumerate(config.stages):
            problems += _stage(config, stage, f"stages.{i}", plugins)
    _raise(problems)


def validate_resolved(config: Config, plugins: Plugins) -> None:
    """Check what depends on the chosen algorithms' classes, whose import loads torch. Raises ConfigError."""
    problems = []
    shards = plugins.layout(config).dp
    profile_of(config, plugins)
    size = plugins.resolve("rollout", config.rollout.engine).ranks_per_engine(config)
    key = "rollout_ranks" if config.resources.rollout_ranks else "train_ranks"
    if size < 1 or getattr(config.resources, key) % size:
        problems.append(f"rollout.engine_args: engines of {size} ranks do not fit in resources.{key} = "
                        f"{getattr(config.resources, key)}")
    for i, stage in enumerate(config.stages):
        algorithm = plugins.resolve("algorithm", stage.algorithm.name)
        if algorithm.online and not config.rewarded:
            problems.append(f"stages.{i}.algorithm.name {stage.algorithm.name} needs reward.kind or reward.parts, or "
                            "environment.name")
        saved = config.checkpoint.save_contents
        if i > 0 and "model" not in saved:
            problems.append(f"stages.{i} goes on with the model of the stage before: checkpoint.save_contents must have model")
        of_policy = [role for role, request in algorithm(config, stage).roles().items() if request.path is None]
        if i > 0 and of_policy and "hf_model" not in saved:
            problems.append(f"stages.{i} makes {' and '.join(of_policy)} of the policy that it begins with: "
                            "checkpoint.save_contents must have hf_model, or name a folder")
        prompts = stage.algorithm.prompts_per_update or stage.algorithm.prompts_per_step
        samples, factor = (config.rollout.samples_per_prompt, " x rollout.samples_per_prompt") if algorithm.online else (1, "")
        if prompts * samples < shards:
            problems.append(f"stages.{i}.algorithm.prompts_per_update{factor} = {prompts * samples} samples cannot be "
                            f"shared by the {shards} data-parallel shards of resources.train_ranks = "
                            f"{config.resources.train_ranks}")
    _raise(problems)


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _single(section: Any, key: str) -> Iterator[str]:
    for field in fields(section):
        full = f"{key}.{field.name}".lstrip(".")
        value = getattr(section, field.name)
        for at, item in [(f"{full}.{i}", x) for i, x in enumerate(value)] if isinstance(value, list) else [(full, value)]:
            if is_dataclass(item):
                yield from _single(item, at)
                if isinstance(item, OptimConfig):
                    yield from _optim(item, at)
            elif item is not None and not isinstance(item, dict):
                yield from _value(item, field, at)


def _value(value: Any, field: Field[Any], key: str) -> Iterator[str]:
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        yield f"{key} is {value!r}; it must be one of {', '.join(choices)}"
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{key} is {value}; it must be finite"
        return
    for limit, (holds, words) in _LIMITS.items():
        if limit in field.metadata and not holds(value, field.metadata[limit]):
            yield f"{key} is {value}; it must be {words} {field.metadata[limit]:g}"


def _names(config: Config, plugins: Plugins) -> Iterator[str]:
    data = {"data.train": config.data.train, "data.validation": config.data.validation}
    chosen = [
        ("actor.backend", "backend", config.actor.backend), ("rollout.engine", "rollout", config.rollout.engine),
        ("reward.kind", "reward", config.reward.kind), ("environment.name", "environment", config.environment.name),
        *((f"{key}.{i}.kind", "source", s.kind) for key, sources in data.items() for i, s in enumerate(sources)),
        *((f"stages.{i}.algorithm.name", "algorithm", s.algorithm.name) for i, s in enumerate(config.stages)),
        *((f"trainer.trackers.{i}", "tracker", name) for i, name in enumerate(config.trainer.trackers)),
        *((f"reward.parts.{i}.kind", "reward", part.kind) for i, part in enumerate(config.reward.parts)),
    ]
    for key, kind, name in chosen:
        try:
            if name is not None:
                plugins.provider(kind, name)
        except ConfigError as error:
            yield f"{key}: {error}" + (f" ({error.hint})" if error.hint else "")


def _sections(config: Config) -> Iterator[str]:
    run, data, rollout, reward = config.run, config.data, config.rollout, config.reward
    if run.name != run.name.strip() or "/" in run.name or "\0" in run.name or run.name in ("", ".", ".."):
        yield f"run.name is {run.name!r}; it must be the plain name of a folder inside run.dir"
    if not data.train:
        yield "data.train is empty; it needs at least one source"
    for i, source in enumerate(data.validation):
        if source.weight != 1:
            yield f"data.validation.{i}.weight has no effect: validation sources are used whole"
    if not config.stages:
        yield "stages is empty; it needs at least one stage, such as [{algorithm: {name: grpo}, steps: 100}]"
    uncorrected = [f"stages.{i}.algorithm.correction" for i, stage in enumerate(config.stages)
                   if stage.algorithm.name not in _OFFLINE and stage.algorithm.correction == "none"]
    if uncorrected and (rollout.top_p < 1 or rollout.top_k > 0):
        yield ("rollout.top_p < 1 and rollout.top_k > 0 sample from another distribution than the trained one: set "
               f"{' and '.join(uncorrected)}, or leave them at 1 and 0 (validation.top_p is free)")
    if uncorrected and rollout.max_staleness:
        yield f"rollout.max_staleness > 0 trains on samples of an older policy: set {' and '.join(uncorrected)}"
    if rollout.tokens_per_round is not None:
        yield from _partial(config, rollout.tokens_per_round, uncorrected)
    if reward.kind is not None and reward.parts:
        yield "reward.kind and reward.parts exclude each other; put the kind among the parts"
    if reward.kwargs and reward.kind is None:
        yield "reward.kwargs has no effect without reward.kind; parts have kwargs of their own"
    if config.environment.kwargs and config.environment.name is None:
        yield "environment.kwargs has no effect without environment.name"
    longest = data.max_prompt_tokens + rollout.max_new_tokens
    if longest > config.actor.tokens_per_micro_batch:
        yield (f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} is more than "
               f"actor.tokens_per_micro_batch = {config.actor.tokens_per_micro_batch}; one sequence must fit")
    yield from _services(config)


def _partial(config: Config, tokens: int, uncorrected: list[str]) -> Iterator[str]:
    """What completions that go on in a later round exclude."""
    if uncorrected:
        yield f"rollout.tokens_per_round trains on tokens of older policies: set {' and '.join(uncorrected)}"
    if config.rollout.max_new_tokens % tokens:
        yield f"rollout.max_new_tokens = {config.rollout.max_new_tokens} is not a multiple of rollout.tokens_per_round = {tokens}"
    if config.environment.name is not None:
        yield "rollout.tokens_per_round excludes environment.name: what an environment says ends a round as it is"
    if config.rollout.stop:
        yield "rollout.tokens_per_round excludes rollout.stop: such a string could begin in one round and end in the next"


def _services(config: Config) -> Iterator[str]:
    validation, checkpoint, resources = config.validation, config.checkpoint, config.resources
    if validation.every and not config.data.validation:
        yield "validation.every needs data.validation"
    if validation.samples_per_prompt > 1 and validation.temperature == 0:
        yield "validation.samples_per_prompt > 1 needs validation.temperature > 0; greedy samples are all the same"
    state = ("model", "optimizer", "extra")
    for key, contents, parts in (("save", checkpoint.save_contents, (*state, "hf_model")),
                                 ("load", checkpoint.load_contents, state)):
        if wrong := set(contents) - set(parts):
            yield f"checkpoint.{key}_contents has {', '.join(sorted(wrong))}; the parts are {', '.join(parts)}"
    if lacking := set(checkpoint.load_contents) - set(checkpoint.save_contents):
        yield f"checkpoint.load_contents has {', '.join(sorted(lacking))}, which checkpoint.save_contents lacks"
    if resources.launcher == "local" and (resources.train_ranks, resources.rollout_ranks) != (1, 0):
        yield (f"resources.launcher local runs one rank, but resources.train_ranks is {resources.train_ranks} and "
               f"resources.rollout_ranks {resources.rollout_ranks}: set resources.launcher=ray")
    if config.rollout.max_staleness and not resources.rollout_ranks:
        yield "rollout.max_staleness needs resources.rollout_ranks: a rank cannot generate while it trains"
    if config.rollout.max_staleness and "model" in (config.reward.kind, *(part.kind for part in config.reward.parts)):
        yield "rollout.max_staleness excludes a reward model: the ranks that hold it train while samples are drawn"
    if resources.launcher == "local" and resources.ray_address is not None:
        yield "resources.ray_address has no effect with resources.launcher local"
    if len(set(config.trainer.trackers)) < len(config.trainer.trackers):
        yield "trainer.trackers names one tracker twice"


def _optim(optim: OptimConfig, key: str) -> Iterator[str]:
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"{key}.betas is {optim.betas}; it must be two numbers, at least 0 and less than 1"


def _online(config: Config, algorithm: AlgorithmConfig, at: str) -> Iterator[str]:
    """What the policy-gradient algorithms of core need."""
    rollout, named = config.rollout, f"{at}.advantage {algorithm.advantage}"
    if algorithm.advantage in GROUPED and rollout.samples_per_prompt < 2:
        yield f"{named} compares a prompt's samples: rollout.samples_per_prompt must be at least 2"
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= rollout.samples_per_prompt:
        yield (f"{at}.pass_k = {algorithm.pass_k} leaves nothing to compare: it must be less than "
               f"rollout.samples_per_prompt = {rollout.samples_per_prompt}")
    if algorithm.advantage == "remax" and rollout.tokens_per_round is not None:
        yield f"{named} draws a greedy completion to its end in each round: rollout.tokens_per_round would save nothing"
    if algorithm.filter_groups and rollout.samples_per_prompt < 2:
        yield f"{at}.filter_groups would drop every prompt: rollout.samples_per_prompt must be at least 2"
    if algorithm.overlong_buffer >= rollout.max_new_tokens:
        yield (f"{at}.overlong_buffer = {algorithm.overlong_buffer} must be less than rollout.max_new_tokens = "
               f"{rollout.max_new_tokens}")
    if algorithm.dual_clip is not None and algorithm.loss not in ("ppo_clip", "gspo"):
        yield f"{at}.dual_clip has no effect with {at}.loss {algorithm.loss}: take ppo_clip or gspo"
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.clip_high:
        yield f"{at}.dual_clip = {algorithm.dual_clip} must be more than 1 + {at}.clip_high = {1 + algorithm.clip_high:g}"


def _stage(config: Config, stage: StageConfig, key: str, plugins: Plugins) -> Iterator[str]:
    algorithm, at = stage.algorithm, f"{key}.algorithm"
    per_update = algorithm.prompts_per_update or algorithm.prompts_per_step
    if (stage.steps is None) == (stage.epochs is None):
        yield f"{key} needs exactly one of {key}.steps and {key}.epochs"
    if algorithm.prompts_per_step % per_update:
        yield (f"{at}.prompts_per_step = {algorithm.prompts_per_step} is not a multiple of {at}.prompts_per_update = "
               f"{per_update}")
    if "advantage" in plugins.presets.get(algorithm.name, {}):
        yield from _online(config, algorithm, at)
    if algorithm.loss_aggregation == "seq_mean_constant" and algorithm.name in _OFFLINE:
        yield f"{at}.loss_aggregation seq_mean_constant divides by rollout.max_new_tokens, which {algorithm.name} has no use for"
    if algorithm.name == "dpo" and algorithm.kl_coef == 0:
        yield f"{at}.name dpo needs {at}.kl_coef > 0"
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (f"{at}.kl_estimator k1 as a loss has an expected gradient of zero: take k2 or k3, or {at}.kl_in reward")
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield f"{at}.kl_target needs {at}.kl_coef > 0 to start from"
    if algorithm.kl_target is not None and algorithm.kl_in == "loss":
        yield f"{at}.kl_target has no effect with {at}.kl_in loss: take {at}.kl_in reward, or a fixed kl_coef"
    if stage.steps is not None:
        critic = algorithm.advantage == "gae"
        each, alone = stage.updates_per_step, algorithm.critic_warmup_steps if critic else 0
        where, optim = (f"{key}.optim", stage.optim) if stage.optim else ("actor.optim", config.actor.optim)
        trained = [("actor", where, optim, (stage.steps - alone) * each)]
        if critic:
            where, optim = ("critic.optim", config.critic.optim) if config.critic.optim else ("actor.optim", config.actor.optim)
            trained.append(("critic", where, optim, stage.steps * each))
        if algorithm.critic_warmup_steps >= stage.steps:
            yield f"{at}.critic_warmup_steps = {algorithm.critic_warmup_steps} leaves none of the {stage.steps} steps"
            return
        for role, where, optim, updates in trained:
            if optim.warmup_steps >= updates:
                yield (f"{where}.warmup_steps = {optim.warmup_steps} leaves none of the {updates} updates of {key} "
                       f"for the {role}")
