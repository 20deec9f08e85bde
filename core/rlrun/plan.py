"""What `rl-run --dry-run` prints."""

from rlrun.config.schema import Config
from rlrun.config.validate import validate_resolved
from rlrun.launch import generates, prompts, stage_steps, user_errors
from rlrun.models.folder import eos_ids
from rlrun.models.loading import parameter_count
from rlrun.plugins import Plugins
from rlrun.rewards.pool import MODEL, reward_parts


@user_errors()
def dry_run(config: Config, plugins: Plugins) -> str:
    """What a run would do, short of loading models or starting ranks: placement, batch arithmetic, memory of a rank."""
    validate_resolved(config, plugins)
    resources, r = config.resources, config.rollout
    how = plugins.layout(config)
    tokenizer, data, sampler = prompts(config, plugins)
    parameters = parameter_count(config.model.path)
    backend = plugins.resolve("backend", config.actor.backend)
    lines = [
        f"plugins    {', '.join(plugins.names)}",
        f"ranks      {how.ranks} on {resources.device}, launcher {resources.launcher}; {how.dp} data-parallel shards",
        f"data       {sampler.rows} training prompts, {len(data.validation)} validation prompts",
        *(f"           {notice}" for notice in data.notices[1:]),
        f"model      {config.model.path}: {parameters:,} parameters, eos {eos_ids(config.model.path, tokenizer)}",
    ]
    for i, stage in enumerate(config.stages):
        o = stage.algorithm
        algorithm = plugins.resolve("algorithm", o.name)(config, stage)
        steps = stage_steps(stage, sampler)
        each = r.samples_per_prompt if algorithm.online else len(algorithm.completions(data.train[0][0]))
        samples = o.prompts_per_step * each
        updates = stage.updates_per_step
        lines.append(f"stage {i}    {o.name}: {steps} steps of {o.prompts_per_step} prompts, {samples} samples, "
                     f"{updates} updates; {steps * updates} updates in all")
        trainable = {"actor": True, **{role: request.trainable for role, request in algorithm.roles().items()}}
        for role, trains in trainable.items():
            held = backend.memory_bytes(config, parameters, how, trains)
            lines.append(f"           {role}: {held / 1e9:.2f} GB a rank{' (weights, gradients, optimizer)' if trains else ''}")
    for part in reward_parts(config.reward):
        if part.kind == MODEL:
            held = backend.memory_bytes(config, parameter_count(part.kwargs["path"]), how, False)
            lines.append(f"reward     {part.kwargs['path']}: {held / 1e9:.2f} GB a rank")
    size = {"bfloat16": 2, "float32": 4, "float64": 8}[config.model.dtype]
    if generates(config, plugins):
        lines.append(f"engine     {r.engine}: {parameters * size / 1e9:.2f} GB of weights")
    return "\n".join(lines)
