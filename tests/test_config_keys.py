"""Case 3: every key of the configuration is read by something, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
from locally import load, train

OPTIM = {"name": "adamw", "lr": 1e-2, "warmup_steps": 1, "schedule": "wsd"}
NOT_READ_HERE = {
    "plugins",  # read by the loader
    "data.validation.weight",  # refused
    "resources.ray_address",  # refused with launcher local
    "resources.rollout_ranks",  # likewise
    "stages.algorithm.on_empty",  # read where a step has nothing to train on
}


def job(directory: Path, model: Path) -> Path:
    """A run of many parts: supervised, GRPO with a KL in the loss, PPO with one in the reward; sources, validation."""
    sources = [{"kind": "jsonl", "path": str(runs.write_questions(directory / f"{name}.jsonl", 12, first))}
               for first, name in ((0, "a"), (12, "b"), (50, "c"))]
    with Path(sources[0]["path"]).open("a") as file:
        file.write(json.dumps({"prompt": "longer than the others", "answer": "x"}) + "\n")
    kl = {"kl_coef": 0.1, "entropy_coef": 0.01, "prompts_per_update": 2}
    parts = [{"kind": "function", "kwargs": {"path": f"{directory / 'reward.py'}:{name}"}} for name in ("letters", "fails")]
    stages = [{**runs.sft(), "steps": None, "epochs": 1, "optim": OPTIM}, runs.grpo(2, **kl),
              runs.grpo(2, **kl, name="ppo", kl_in="reward", kl_target=0.1)]
    path = runs.write_run(
        directory, model, *stages, data={"train": sources[:2], "validation": sources[2:]}, critic={"optim": OPTIM},
        actor={"optim": OPTIM}, reward={"kind": None, "kwargs": {}, "parts": parts}, validation={"every": 2},
        checkpoint={"every": 2})
    with (directory / "reward.py").open("a") as file:
        file.write("\n\ndef fails(item):\n    return 1 / (len(item.completion) % 3)\n")
    return path


def test_every_key_is_read(model, tmp_path):
    """Case 3: a run of many parts, and the same with more steps, look at every key but those that are refused."""
    from rlrun import launch
    from rlrun.testing.recording import leaf_keys, recording

    path, read = job(tmp_path, model), set()
    plain = runs.write_run(tmp_path / "plain", model, runs.grpo(1), environment={"name": "reasoning_gym", "kwargs": {"tag": "x"}})
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "a", "rejected": "b"}) + "\n" for i in range(4)))
    pass_at_k = runs.grpo(1, name="pass_at_k", pass_k=2, correction="token_tis", overlong_buffer=2)
    dpo = runs.write_run(tmp_path / "dpo", model, {"algorithm": {"name": "dpo", "prompts_per_step": 4}, "steps": 1}, pass_at_k,
                         data={"train": [{"kind": "jsonl", "path": str(pairs)}]})
    adapters = [plain, "model.gradient_checkpointing=true", "fsdp.lora.rank=2", "run.name=adapters",
                "fsdp.profile.use_profile=true"]
    for run in ([path], [path, "stages.2.steps=3"], [plain], adapters, [dpo]):
        config, plugins = load(*run)
        stand_in, seen = recording(config)
        assert launch.run(stand_in, plugins) == 0
        read |= seen
    assert leaf_keys(type(config)) - read == NOT_READ_HERE


@pytest.mark.parametrize("override, match", [
    ("rollout.top_p=0.9", "rollout.top_p"), ("rollout.top_k=5", "rollout.top_k"), ("resources.ray_address=auto", "ray_address"),
    ("resources.rollout_ranks=1", "rollout_ranks"),
    ("data.validation.0.weight=2", "data.validation.0.weight"), ("data.train.0.options={split: a}", "no options split"),
    ("data.train.0={kind: reasoning_gym, path: chain_sum, prompt_key: question}", "prompt_key"),
])
def test_refused(override, match, model, tmp_path):
    """Case 3: what would have no effect is an error before anything starts."""
    from rlrun.errors import ConfigError

    path = job(tmp_path, model)
    with pytest.raises(ConfigError, match=match):
        train(path, override)


@pytest.mark.parametrize("contents, missing", [("[hf_model]", "model"), ("[model]", "hf_model")])
def test_what_a_later_stage_needs_is_saved(contents, missing, model, tmp_path):
    """A second stage without its first stage's model, or without the reference made of it, is refused at start."""
    from rlrun.errors import ConfigError

    path = runs.write_run(tmp_path, model, runs.sft(1), runs.grpo(1, kl_coef=0.1))
    with pytest.raises(ConfigError, match=f"stages.1.*save_contents must have {missing}"):
        train(path, f"checkpoint.save_contents={contents}", "checkpoint.load_contents=[]")
    if missing == "hf_model":
        train(path, f"checkpoint.save_contents={contents}", "checkpoint.load_contents=[]", f"ref.path={model}")


def test_dump_and_processes(model, tmp_path):
    """Case 3: rollouts are dumped every so many steps; more scoring processes change no number."""
    path = runs.write_run(tmp_path, model, runs.grpo(4), trainer={"dump_rollouts_every": 2})
    one = train(path)
    assert sorted(p.name for p in (tmp_path / "run" / "rollouts").iterdir()) == ["step_000002.jsonl", "step_000004.jsonl"]
    assert train(path, "run.name=two", "reward.processes=2") == one


def test_stop_strings(model, tmp_path):
    """Case 3: a completion ends with a stop string, and counts as stopped."""
    path = runs.write_run(tmp_path, model, runs.grpo(1), rollout={"max_new_tokens": 12},
                          trainer={"dump_rollouts_every": 1})
    train(path)
    letters = [chr(c) for c in range(97, 123)]
    [row] = train(path, "run.name=stop", f"rollout.stop=[{','.join(letters)}]")
    records = [json.loads(line) for line in (tmp_path / "stop" / "rollouts" / "step_000001.jsonl").open()]
    plain = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").open()]
    stopped = [r for r in records if r["finish_reason"] == "stop" and set(r["completion"]) & set(letters)]
    assert stopped
    for record, whole in zip(records, plain):
        assert whole["completion"].startswith(record["completion"])
        assert not set(record["completion"][:-1]) & set(letters)
    assert row["response_length/mean"] < 12
