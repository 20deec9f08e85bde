"""Runs over several turns: every token that is trained on or passed over is where it came from."""

from __future__ import annotations

import json
import string

import pytest
import runs
from locally import train

PLUGIN = '''
"""An environment that answers once or twice, and an engine that writes down what it was asked and what it drew."""
import json
import os

from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl


@hookimpl
def plugin_info():
    return PluginInfo("talk", API_VERSION, provides={"environment": {"talk": "talk:Talk"}, "rollout": {"noting": "talk:Noting"}})


def note(**what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")


@hookimpl
def compute_metrics(step):
    b, lengths = step.batch, step.batch.lengths.tolist()
    rows = zip(*(b.tokens[name].split(lengths) for name in ("ids", "loss_mask", "rollout_log_probs")))
    note(trained=[[x.tolist() for x in row] for row in rows])
    return {}


class Talk:
    def __init__(self, last):
        self.last = last

    def reset(self, sample):
        return {"turns": 0, "prompt": sample.prompt}

    def step(self, state, messages):
        assert messages[0] == {"role": "user", "content": state["prompt"]}
        assert [m["role"] for m in messages[1:]] == ["assistant", "tool"] * state["turns"] + ["assistant"]
        state["turns"] += 1
        reply = {"role": "tool", "content": f" {state['turns']}?"}
        return [reply], 0.25, state["turns"] > (len(messages[1]["content"]) + self.last) % 2


def __getattr__(name):
    if name != "Noting":
        raise AttributeError(name)
    from rlrun.rollout.hf import HfRollout

    class Noting(HfRollout):
        def generate(self, requests, params):
            drawn = super().generate(requests, params)
            for request, c in zip(requests, sorted(drawn, key=lambda c: c.index)):
                assert request.index == c.index
                note(asked=[request.key, request.prompt_ids, c.ids, c.finish_reason])
            return drawn

    return Noting
'''


@pytest.fixture
def talk(tmp_path, monkeypatch):
    (tmp_path / "talk.py").write_text(PLUGIN)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.jsonl"))

    def read(what):
        return [row[what] for row in map(json.loads, (tmp_path / "notes.jsonl").open()) if what in row]

    return read


def write(directory, model, stage=None, **sections):
    """Letters end a reply, so that an untrained model comes to an end."""
    return runs.write_run(
        directory, model, stage or runs.grpo(2), plugins=["fsdp", str(directory / "talk.py")],
        environment={"name": "talk", "kwargs": {"last": 1}, "max_turns": 3}, data={"max_prompt_tokens": 48},
        rollout={"engine": "noting", "max_new_tokens": 12, "stop": list(string.ascii_letters), "gap_fraction": 1.0},
        trainer={"dump_rollouts_every": 1}, **sections)


def dumped(directory, step):
    return [json.loads(line) for line in (directory / "run" / "rollouts" / f"step_{step:06d}.jsonl").open()]


@pytest.mark.parametrize("chat", [False, True])
def test_streams_reassemble_from_their_parts(chat, talk, tmp_path):
    """Each turn's request is the last one, what was drawn for it, and what the template puts between, and so is what is
    trained on; the mask covers what was drawn; the trainer's log-probabilities are the engine's, in every turn."""
    from rlrun.models.folder import load_tokenizer
    from rlrun.testing.tiny import CHATML

    model = runs.write_model(tmp_path / "model", chat_template=CHATML if chat else None)
    rows = train(write(tmp_path, model), "data.max_prompt_tokens=80")
    tokenizer = load_tokenizer(str(model))
    streams, masks, turns = {}, {}, {}
    for key, prompt, drawn, reason in talk("asked"):
        base, _, turn = key.partition("|turn ")
        turns[base] = int(turn or 0) + 1
        if turn:
            between = (f"<eos><|tool|> {turn}?<eos><|assistant|>" if chat else f" {turn}?")
            ids = tokenizer(between)["input_ids"]
            ids = ids[1:] if chat and streams[base][-1] == 1 else ids
            assert prompt == streams[base] + ids
            masks[base] += [False] * len(ids)
        else:
            masks[base] = [False] * len(prompt)
        streams[base], masks[base] = prompt + drawn, masks[base] + [True] * len(drawn)
    assert set(turns.values()) == {1, 2}
    trained = [row for step in talk("trained") for row in step]
    assert sorted((ids, mask) for ids, mask, _ in trained) == sorted((streams[k], masks[k]) for k in streams)
    assert all((x != 0) == m for _, mask, log_probs in trained for x, m in zip(log_probs, mask))
    assert all(row["rollout/gap_max"] < 1e-4 for row in rows)
    assert rows[0]["rollout/turns/max"] == 2
    for record in dumped(tmp_path, 1):
        parts = record.get("turns", [])
        assert [p["by"] for p in parts] in ([], ["policy", "environment", "policy"])
        assert sum(p["tokens"] for p in parts) in (0, record["tokens"])
        assert parts == [] or parts[1]["text"] == ("<eos><|tool|> 1?<eos><|assistant|>"[5 * parts[0]["text"].endswith("<eos>"):]
                                                    if chat else " 1?")


def test_rewards_add_up_and_runs_repeat(model, talk, tmp_path):
    """The environment's steps and the configured reward, which sees the last reply; a second run gives the same numbers."""
    path = write(tmp_path, model)
    rows = train(path)
    for record in dumped(tmp_path, 1):
        turns = 2 if "turns" in record else 1
        assert record["parts"]["environment"] == 0.25 * turns
        assert record["parts"]["function"] == sum(map(ord, record["completion"])) % 7 / 7
        assert record["reward"] == pytest.approx(sum(record["parts"].values()))
    assert rows[0]["critic/score/mean"] == pytest.approx(rows[0]["reward/environment"] + rows[0]["reward/function"], rel=1e-6)
    assert train(path, "run.name=again") == rows
    [alone] = train(write(tmp_path, model, runs.grpo(1), reward={"kind": None, "kwargs": {}}), "run.name=alone")
    assert alone["critic/score/mean"] == pytest.approx(alone["reward/environment"])


@pytest.mark.parametrize("limit", ["environment.max_turns=1", "data.max_prompt_tokens=4"])
def test_limits(limit, model, talk, tmp_path):
    """An episode that the limits cut has finish_reason length, and never more tokens than they allow."""
    train(write(tmp_path, model, runs.grpo(1)), limit, "rollout.max_new_tokens=6")
    records = dumped(tmp_path, 1)
    cut = [r for r in records if r["finish_reason"] == "length"]
    assert cut
    assert max(len(ids) for ids, _, _ in talk("trained")[0]) <= (10 if "data" in limit else 54)
    if limit == "environment.max_turns=1":
        assert not any("turns" in r for r in records)
    else:
        assert any("turns" in r for r in records)


def test_a_failing_environment_ends_the_run_if_asked_to(model, talk, tmp_path):
    with pytest.raises(RuntimeError, match=r"TypeError.*reward.on_error is raise"):
        train(write(tmp_path, model), "environment.kwargs.last=x", "reward.on_error=raise")
