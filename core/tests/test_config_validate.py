"""Validation: single values and combinations, refused before any model is loaded."""

import pytest

from rlrun.algorithms.presets import PRESETS
from rlrun.config.load import load_config, to_yaml
from rlrun.config.validate import validate, validate_resolved
from rlrun.errors import ConfigError
from rlrun.folder import changes
from rlrun.plugins import Plugins
from rlrun.testing.installed import install

BASE = """
plugins: [toy]
run: {name: test}
model: {path: some/model}
data: {train: [{kind: jsonl, path: train.jsonl}], validation: [{kind: jsonl, path: val.jsonl}]}
reward: {kind: function, kwargs: {path: "rewards.py:score"}}
stages: [{algorithm: {name: grpo, prompts_per_step: 8}, steps: 10}]
"""

TOY = """
from rlrun.algorithms.base import Algorithm
from rlrun.hookspecs import PluginInfo, hookimpl
from rlrun.workers.protocol import Layout

class Backend:
    @staticmethod
    def layout(config, ranks, sp):
        return Layout(ranks // sp, tuple(rank // sp for rank in range(ranks)), tuple(range(0, ranks, sp)))

class Online(Algorithm):
    pass

class Offline(Algorithm):
    online = False

@hookimpl
def plugin_info():
    return PluginInfo("toy", 1, None, {
        "backend": {"fsdp": "MODULE:Backend"}, "rollout": {"far": "MODULE:Far"},
        "algorithm": {"online": "MODULE:Online", "offline": "MODULE:Offline"}})
"""


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(*overrides) -> (Config, Plugins), with a plugin `toy` that provides a backend."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("site")
        patch.syspath_prepend(str(folder))
        install(folder, "toy", TOY)
        (folder / "run.yaml").write_text(BASE)
        yield lambda *overrides: load_config(folder / "run.yaml", overrides)


def refused(load, *overrides):
    with pytest.raises(ValueError) as caught:
        load(*overrides)
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("key, bad, good", [
    ("stages.0.algorithm.kl_target", [0.0, -1.0, NAN, INF], [0.1]),
    ("stages.0.algorithm.kl_horizon", [0, -1], [1]),
    ("rollout.temperature", [0.0, -1.0, NAN, INF, -INF], [0.5]),
    ("rollout.samples_per_prompt", [0, -1, 1], [2]),
    ("stages.0.algorithm.gamma", [0.0, -1.0, 1.01, NAN], [1.0]),
    ("stages.0.algorithm.lam", [-0.1, 1.1, NAN], [0.0, 1.0]),
    ("stages.0.algorithm.clip_low", [0.0, -1.0, 1.01, NAN], [0.9, 1.0]),
    ("stages.0.algorithm.dual_clip", [0.0, 1.0, NAN], [None, 3.0]),
    ("stages.0.algorithm.correction_cap", [0.0, 1.0, NAN], [2.0]),
    ("stages.0.algorithm.entropy_target", [0.0, NAN], [None, 0.3]),
    ("stages.0.algorithm.clip_high", [0.0, -1.0, NAN, INF], [5.0]),
    ("stages.0.algorithm.value_clip", [0.0, -1.0, NAN], [0.1]),
    ("stages.0.algorithm.kl_coef", [-1.0, NAN], [0.2]),
    ("stages.0.algorithm.prompts_per_step", [0, -8], [16]),
    ("stages.0.algorithm.epochs_per_step", [0, -1], [3]),
    ("stages.0.steps", [0, -1], [1]),
    ("actor.optim.lr", [0.0, -1.0, NAN, INF], [1.0]),
    ("actor.optim.betas", [[0.9], [0.9] * 3, [1.0, 0.9], [0.9, -1.0], [NAN, 0.9]], [[0.0, 0.5]]),
    ("critic.optim.betas", [[0.9]], [[0.0, 0.5]]),
    ("actor.optim.decay_fraction", [0.0, 1.5], [1.0]),
    ("data.train.0.weight", [0.0, -1.0, NAN], [0.1]),
    ("validation.temperature", [-1.0, NAN], [0.0, 1.0]),
    ("validation.top_p", [0.0, 1.1, NAN], [0.5]),
    ("reward.timeout_s", [0.0, -1.0, NAN, INF], [1.0]),
    ("resources.train_ranks", [0, -1], [2]),
    ("checkpoint.keep", [0, -1], [None, 1]),
    ("run.seed", [-1], [0]),
])
def test_values_alone(load, key, bad, good):
    """Cases 8, 30: values that would fail or do harm in the middle of a run are refused at start, with the key."""
    config, plugins = load("stages.0.algorithm.kl_coef=0.1", "stages.0.algorithm.kl_in=reward", "critic.optim={}")

    def check(value):
        section, *rest = config, *key.split(".")
        for part in rest[:-1]:
            section = section[int(part)] if isinstance(section, list) else getattr(section, part)
        setattr(section, rest[-1], value)
        validate(config, plugins)

    for value in bad:
        assert key in refused(check, value), value
    for value in good:
        check(value)


CORRECTED = ["stages.0.algorithm.correction=token_tis"]


@pytest.mark.parametrize("overrides, keys", [
    # Case 7: integer division never goes wrong in silence
    (["stages.0.algorithm.prompts_per_update=3"], ["prompts_per_step = 8", "prompts_per_update = 3"]),
    (["stages.0.algorithm.prompts_per_update=16"], ["algorithm.prompts_per_step = 8", "prompts_per_update = 16"]),
    (["stages.0.steps=null"], ["stages.0.steps", "stages.0.epochs"]),
    (["stages.0.epochs=1"], ["stages.0.steps", "stages.0.epochs"]),
    (["stages=[]"], ["stages is empty"]),
    (["data.train=[]"], ["data.train is empty"]),
    (["rollout.top_p=0.9"], ["rollout.top_p", "rollout.top_k"]),
    (["rollout.top_k=50"], ["rollout.top_p", "rollout.top_k"]),
    (["rollout.top_p=0.9", "stages=[{steps: 2, algorithm: {correction: token_tis}}, {steps: 2}]"], ["stages.1.algorithm.corr"]),
    (["stages.0.algorithm={name: sft, loss_aggregation: seq_mean_constant}"], ["loss_aggregation", "sft"]),
    (["stages.0.algorithm.dual_clip=1.1"], ["algorithm.dual_clip = 1.1", "clip_high = 1.2"]),
    (["stages.0.algorithm={dual_clip: 3, loss: cispo}"], ["algorithm.dual_clip", "algorithm.loss cispo"]),
    (["stages.0.algorithm.overlong_buffer=1024"], ["algorithm.overlong_buffer = 1024", "rollout.max_new_tokens = 1024"]),
    (["stages.0.algorithm={name: pass_at_k, pass_k: 8}"], ["algorithm.pass_k = 8", "rollout.samples_per_prompt = 8"]),
    (["stages.0.algorithm={name: ppo, filter_groups: true}", "rollout.samples_per_prompt=1"], ["algorithm.filter_groups"]),
    (["reward.parts=[{kind: function}]"], ["reward.kind", "reward.parts"]),
    (["reward.kind=null", "reward.parts=[{kind: function}]"], ["reward.kwargs", "reward.kind"]),
    (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt", "grpo"]),
    (["rollout.samples_per_prompt=1", "stages.0.algorithm.name=opo"], ["rollout.samples_per_prompt", "opo"]),
    (["stages.0.algorithm.kl_coef=0.1", "stages.0.algorithm.kl_estimator=k1"], ["kl_estimator", "kl_in"]),
    (["stages.0.algorithm.kl_target=0.1", "stages.0.algorithm.kl_in=reward"], ["kl_target", "kl_coef"]),
    (["stages.0.algorithm.kl_coef=0.1", "stages.0.algorithm.kl_target=0.1"], ["algorithm.kl_target has no effect", "kl_in loss"]),
    (["rollout.max_new_tokens=16000"], ["data.max_prompt_tokens", "rollout.max_new_tokens", "tokens_per_micro_batch"]),
    (["resources.launcher=local", "resources.train_ranks=2"], ["resources.launcher", "resources.train_ranks"]),
    (["resources.launcher=local", "resources.ray_address=x:1"], ["resources.launcher", "resources.ray_address"]),
    (["data.validation.0.weight=2"], ["data.validation.0.weight"]),
    (["validation.every=5", "data.validation=[]"], ["validation.every", "data.validation"]),
    (["validation.samples_per_prompt=4"], ["validation.samples_per_prompt", "validation.temperature"]),
    (["checkpoint.save_contents=[model, all]", "checkpoint.load_contents=[]"], ["save_contents has all"]),
    (["checkpoint.load_contents=[hf_model]"], ["load_contents has hf_model"]),
    (["checkpoint.save_contents=[model, extra]"], ["load_contents has optimizer", "save_contents"]),
    (["actor.optim.warmup_steps=10"], ["actor.optim.warmup_steps", "10 updates of stages.0"]),
    (["stages.0.optim={warmup_steps: 10}"], ["stages.0.optim.warmup_steps", "stages.0"]),
    (["stages.0.algorithm.critic_warmup_steps=10"], ["critic_warmup_steps", "10 steps"]),
    (["stages.0.algorithm={name: ppo, critic_warmup_steps: 4}", "actor.optim.warmup_steps=6"],
     ["actor.optim.warmup_steps", "6 updates of stages.0 for the actor"]),
    (["stages.0.algorithm.name=ppo", "critic.optim.warmup_steps=10"],
     ["critic.optim.warmup_steps", "10 updates of stages.0 for the critic"]),
    (["trainer.trackers=[console, consol]"], ["trainer.trackers.1: no tracker 'consol'", "did you mean 'console'"]),
    (["trainer.trackers=[console, console]"], ["trainer.trackers"]),
    (["actor.backend=fdsp"], ["actor.backend: no backend 'fdsp'", "did you mean 'fsdp'"]),
    (["rollout.engine=vlm"], ["rollout.engine: no rollout 'vlm'"]),
    (["stages.0.algorithm.name=grpoo"], ["stages.0.algorithm.name: no algorithm 'grpoo'", "did you mean 'grpo'"]),
    (["reward.kind=fn"], ["reward.kind: no reward 'fn'"]),
    (["reward.kind=null", "reward.parts=[{kind: maths}]"], ["reward.parts.0.kind: no reward 'maths'"]),
    (["environment.name=reasoning"], ["environment.name: no environment 'reasoning'", "did you mean 'reasoning_gym'"]),
    (["environment.kwargs={a: 1}"], ["environment.kwargs", "environment.name"]),
    (["rollout.max_staleness=1", "resources.rollout_ranks=1", "reward.kind=model"], ["rollout.max_staleness", "reward model"]),
    (["rollout.tokens_per_round=512"], ["rollout.tokens_per_round", "stages.0.algorithm.correction"]),
    (["rollout.tokens_per_round=500", *CORRECTED], ["rollout.max_new_tokens = 1024", "rollout.tokens_per_round = 500"]),
    (["rollout.tokens_per_round=512", "environment.name=reasoning_gym", *CORRECTED], ["tokens_per_round", "environment.name"]),
    (["rollout.tokens_per_round=512", "rollout.stop=[x]", *CORRECTED], ["tokens_per_round", "rollout.stop"]),
    (["rollout.tokens_per_round=512", "stages.0.algorithm={name: remax, correction: token_tis}"], ["tokens_per_round", "remax"]),
    (["data.train.0.kind=csv"], ["data.train.0.kind: no source 'csv'; there is: datasets, jsonl"]),
    (["data.validation.0.kind=csv"], ["data.validation.0.kind: no source 'csv'"]),
    (["run.name="], ["run.name"]), (["run.name=a/b"], ["run.name"]), (["run.name=.."], ["run.name"]),
    (["run.name= a"], ["run.name"]),
])
def test_combinations(load, overrides, keys):
    """Cases 7, 8, 79, 90: impossible combinations fail at start and name the keys on both sides."""
    message = refused(load, *overrides)
    for key in keys:
        assert key in message


@pytest.mark.parametrize("overrides", [
    [], ["stages.0.algorithm.prompts_per_update=4", "actor.optim.warmup_steps=19"], ["rollout.samples_per_prompt=2"],
    *(["rollout.samples_per_prompt=1", f"stages.0.algorithm.name={name}"] for name in ("ppo", "remax", "reinforce_pp")),
    ["rollout.samples_per_prompt=1", "stages.0.algorithm.name=sft"], ["rollout.top_p=0.9", "stages.0.algorithm.name=sft"],
    ["rollout.top_p=0.9", "rollout.top_k=50", "stages.0.algorithm.correction=token_tis"],
    ["stages.0.steps=null", "stages.0.epochs=1"], ["rollout.tokens_per_round=512", *CORRECTED],
    ["stages.0.algorithm.kl_coef=0.1", "stages.0.algorithm.kl_estimator=k1", "stages.0.algorithm.kl_in=reward"],
    ["stages.0.algorithm={kl_coef: 0.1, kl_target: 0.1, kl_in: reward}"], ["rollout.max_new_tokens=15360"],
    ["resources.launcher=local"], ["rollout.engine=far"], ["validation.top_p=0.5"],
    ["validation.samples_per_prompt=4", "validation.temperature=0.7"], ["run.name=größe = 1.5b (x)"],
    ["checkpoint.save_contents=[hf_model]", "checkpoint.load_contents=[]"],
    ["actor.optim.warmup_steps=10", "stages.0.optim={lr: 1e-3}"], ["critic.optim.warmup_steps=10"],
    ["stages.0.algorithm={name: ppo, critic_warmup_steps: 4}", "actor.optim.warmup_steps=5", "critic.optim.warmup_steps=9"],
    *([f"stages.0.algorithm.name={name}"] for name in PRESETS),
])
def test_possible_combinations(load, overrides):
    """The same rules let pass what is possible."""
    load(*overrides)


def test_rules_that_need_the_algorithm(load):
    """Cases 7, 111: an online stage needs a reward; the samples of an update must reach every rank."""
    online, offline = "stages.0.algorithm.name=online", "stages.0.algorithm.name=offline"
    no_reward = ["reward.kind=null", "data.validation=[]"]
    text = BASE.replace("{kind: function, kwargs: {path: \"rewards.py:score\"}}", "{}")
    assert text != BASE

    def check(*overrides):
        validate_resolved(*load(*overrides))

    for good in ([online], [offline], [online, "resources.train_ranks=64"], [offline, "resources.train_ranks=8"]):
        check(*good)
    assert "stages.0.algorithm.prompts_per_update x rollout.samples_per_prompt = 64" in refused(
        check, online, "resources.train_ranks=65")
    message = refused(check, offline, "resources.train_ranks=9")
    assert "stages.0.algorithm.prompts_per_update = 8" in message
    assert "resources.train_ranks = 9" in message
    one = ["stages.0.algorithm.prompts_per_update=1", "rollout.samples_per_prompt=1", "resources.train_ranks=2"]
    assert "prompts_per_update" in refused(check, online, *one)
    assert "reward.kwargs" in refused(load, *no_reward)


def test_online_stage_without_reward(tmp_path, monkeypatch):
    """Case 111: training without any reward is no training."""
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "toy", TOY)
    (tmp_path / "run.yaml").write_text("\n".join(
        line.split(", validation")[0] + "}" if line.startswith("data") else line
        for line in BASE.splitlines() if not line.startswith("reward")))

    def check(*overrides):
        validate_resolved(*load_config(tmp_path / "run.yaml", overrides))

    check("data.validation=${data.train}", "stages.0.algorithm.name=offline")
    assert refused(check, "stages.0.algorithm.name=online") == (
        "stages.0.algorithm.name online needs reward.kind or reward.parts, or environment.name")


def test_built_in_names_are_what_they_say():
    """Every built-in name can be imported once all of core is there; algorithms say whether they generate."""
    plugins = Plugins.load([])
    offline = {name for name in plugins.provided("algorithm") if not plugins.resolve("algorithm", name).online}
    assert offline == {"sft", "dpo"}


def test_a_resumed_run_may_not_change_its_numbers(load, tmp_path):
    """Case 46: what changes even a last bit is refused on resume; how memory is used is free."""
    (tmp_path / "config.yaml").write_text(to_yaml(load()[0]))
    assert changes(tmp_path / "config.yaml", load("resources.train_ranks=2")[0]) == {"resources.train_ranks": (1, 2)}
    message = refused(lambda key: changes(tmp_path / "config.yaml", load(key)[0]), "rollout.stop=[x]")
    assert "rollout.stop was" in message
