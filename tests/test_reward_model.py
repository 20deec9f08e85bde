"""A reward model on the ranks gives the scores that transformers gives, one unpadded text at a time."""

from __future__ import annotations

import json

import pytest
import runs
import torch
from locally import load, train

from rlrun.rewards.protocol import RewardItem
from rlrun.testing.gloo import drive
from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import build_tokenizer, tiny_config

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}<end>{% endfor %}"
"""Not the policy's template: messages end with a token of its own, and texts are trimmed."""
TEXTS = ["7", "a somewhat longer answer than the others, by far", "", "x" * 30, "no", " spaces "]
ITEMS = [RewardItem("3+4=", text, "7", "q") for text in TEXTS] + [
    RewardItem([{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "?"}, {"role": "user", "content": "!"}],
               "7", "7", "q")]


def write_reward_model(directory, kind, pad=0, template=TEMPLATE, labels=1):
    from transformers import AutoModelForSequenceClassification

    tokenizer = build_tokenizer(["<end>", "<u>", "<a>"], template)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    config = tiny_config(kind, len(tokenizer), num_labels=labels, pad_token_id=pad, **sizes)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def by_transformers(path, items):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    scores = []
    for item in items:
        prompt = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
        talk = [*prompt, {"role": "assistant", "content": item.completion}]
        ids = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            scores.append(model(ids).logits.item())
    return scores


def score(workers, plugins, config, path, items):
    from rlrun.rewards.model import ROLE, RewardModel

    model = RewardModel(config, 2.0, str(path))
    workers.build(ROLE, model.request, 1, frozenset({"values"}))
    return model.score(items, workers)


@pytest.fixture
def config(model, tmp_path):
    return load(runs.write_run(tmp_path / "run", model, resources={"launcher": "auto"}))[0]


@pytest.mark.parametrize("kind, pad", [("llama", 0), ("llama", 258), ("qwen2", 0), ("gpt2", 0)])
def test_scores_are_those_of_transformers(kind, pad, config, ranks1, ranks2, tmp_path):  # noqa: F811
    """At the last token that is no padding (258 is the token that ends every message), packed with others, on 1 and 2
    ranks, also where a rank gets nothing."""
    path = write_reward_model(tmp_path / "rm", kind, pad)
    expected = by_transformers(path, ITEMS)
    assert max(expected) - min(expected) > 0.1
    config.actor.tokens_per_micro_batch = 100
    for ranks in (ranks1, ranks2):
        found = drive(ranks, config, score, path, ITEMS)
        assert [s.correct for s in found] == pytest.approx(expected, abs=1e-5)
        assert [s.reward for s in found] == pytest.approx([2 * x for x in expected], abs=2e-5)
        assert [s.parts["model"] for s in found] == [s.correct for s in found]
    [alone] = drive(ranks2, config, score, path, ITEMS[:1])
    assert alone.correct == pytest.approx(expected[0], abs=1e-5)


def test_too_long_and_unrenderable(config, ranks1, tmp_path):  # noqa: F811
    """They are errors of their samples alone, dealt with as reward.on_error says."""
    template = "{% for m in messages %}{{ raise_exception('no') if m.content == 'no' }}{{ m.content }}{% endfor %}"
    path = write_reward_model(tmp_path / "rm", "llama", template=template)
    config.actor.tokens_per_micro_batch = 36
    found = drive(ranks1, config, score, path, ITEMS[:6])
    assert [s.error for s in found] == [
        None, "model: ValueError: the conversation has 52 tokens; max_tokens is 35", None, None,
        "model: TemplateError: no", None]
    assert [s.reward == 0 for s in found] == [False, True, False, False, True, False]
    config.reward.on_error = "drop"
    assert [s.reward is None for s in drive(ranks1, config, score, path, ITEMS[:6])] == [False, True, False, False, True, False]
    config.reward.on_error = "raise"
    with pytest.raises(RuntimeError, match="reward.on_error is raise"):
        drive(ranks1, config, score, path, ITEMS[:6])


def test_in_a_run(model, tmp_path):
    """A part of the weighted sum, in training and validation; where another part fails it counts alone."""
    rm = write_reward_model(tmp_path / "rm", "llama")
    parts = [{"kind": "function", "kwargs": {"path": f"{tmp_path / 'reward.py'}:sometimes"}},
             {"kind": "model", "weight": 0.5, "kwargs": {"path": str(rm)}}]
    data = {"validation": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "unseen.jsonl", 6, 50))}]}
    path = runs.write_run(tmp_path, model, runs.grpo(2), reward={"kind": None, "kwargs": {}, "parts": parts}, data=data,
                          validation={"at_start": True}, trainer={"dump_rollouts_every": 1})
    with (tmp_path / "reward.py").open("a") as file:
        file.write("\n\ndef sometimes(item):\n    return 1 / (len(item.completion.encode()) % 4)\n")
    rows = train(path)
    records = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").open()]
    expected = by_transformers(rm, [RewardItem(r["prompt"], r["completion"], "", "") for r in records])
    for record, value in zip(records, expected, strict=True):
        assert record["parts"]["model"] == pytest.approx(value, abs=1e-5)
        assert record["reward"] == pytest.approx(record["parts"].get("function", 0.0) + 0.5 * value, abs=1e-5)
    assert {"function" in r["parts"] for r in records} == {True, False}
    assert rows[1]["reward/model"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert rows[1]["reward/errors"] == sum("function" not in r["parts"] for r in records)
    validated = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "validation_000000.jsonl").open()]
    mean = sum(r["reward"] for r in validated) / len(validated)
    assert rows[0]["val-aux/unseen/reward/mean@1"] == pytest.approx(mean)
    alone = train(path, "run.name=alone", f"reward={{kind: model, kwargs: {{path: {rm}}}, parts: []}}", "stages.0.steps=1")
    assert alone[1]["critic/score/mean"] == pytest.approx(alone[1]["reward/model"])


def test_refused(model, tmp_path):
    """Two reward models, a model of two outputs, a folder that is none, a limit that no micro-batch fits."""
    from rlrun.errors import ConfigError

    good, two = write_reward_model(tmp_path / "rm", "llama"), write_reward_model(tmp_path / "two", "llama", labels=2)
    path = runs.write_run(tmp_path, model, reward={"kind": None, "kwargs": {}})

    def part(folder, more=""):
        return f"{{kind: model, kwargs: {{path: {folder}{more}}}}}"

    for parts, message in ((f"{part(good)}, {part(good)}", "two of kind model"), (part(two), "has 2 outputs"),
                           (part(tmp_path), "not a model folder"), (part(good, ", max_tokens: 999"), "at most 255")):
        with pytest.raises(ConfigError, match=message):
            train(path, f"reward.parts=[{parts}]")
