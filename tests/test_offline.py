"""Stages that learn from given answers: what they reach, and what they say of held-out answers."""

from __future__ import annotations

import json
import math

import pytest
import runs
from locally import load, train

DPO = {"algorithm": {"name": "dpo", "prompts_per_step": 8}, "steps": 8}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "jsonl", "path": str(path), "answer_key": "chosen" if "chosen" in rows[0] else "answer"}


def preferences(first, count):
    """Answers are letters; those of the alphabet's first half are preferred to those of its second."""
    return [{"prompt": f"{i}:", "chosen": "abcdefgh"[i % 8], "rejected": "stuvwxyz"[i * 5 // 3 % 8]}
            for i in range(first, first + count)]


def choices(first, count):
    """Each of 4 answers once to every prompt: nobody can do better than log 4 nats for the letter, and 0 for the end."""
    return [{"prompt": f"{i}:", "answer": letter} for i in range(first, first + count) for letter in "abcd"]


def write(directory, model, stage, train_rows, validation_rows, **sections):
    data = {"train": [write_rows(directory / "rows.jsonl", train_rows)],
            "validation": [write_rows(directory / "unseen.jsonl", validation_rows)]}
    return runs.write_run(directory, model, stage, data=data, reward={"kind": None, "kwargs": {}},
                          validation={"at_start": True, "at_end": True}, **sections)


def test_sft_reaches_the_entropy_floor(model, tmp_path):
    """The loss of unseen prompts' answers comes down to half of log 4 nats a token, and not below."""
    stage = {**runs.sft(100, prompts_per_step=64), "optim": {"lr": 1e-2, "schedule": "linear"}}
    rows = train(write(tmp_path, model, stage, choices(0, 50), choices(50, 20)))
    floor = math.log(4) / 2
    before, after = rows[0]["val-core/unseen/nll/mean"], rows[-1]["val-core/unseen/nll/mean"]
    assert before > 5
    assert floor - 1e-6 < after < floor * 1.03
    assert rows[-1]["sft/loss"] == pytest.approx(floor, rel=0.05)


def test_dpo_prefers_unseen_pairs(model, tmp_path):
    """The reference is the policy as the stage begins: at first all rewards are 0. Pairs of unseen prompts come right."""
    rows = train(write(tmp_path, model, DPO, preferences(0, 64), preferences(64, 40)))
    name = "val-core/unseen/{}/mean".format
    assert [rows[0][name("loss")], rows[1]["dpo/loss"]] == pytest.approx([math.log(2)] * 2, rel=1e-6)
    assert rows[0][name("margin")] == rows[1]["dpo/margin"] == rows[1]["dpo/chosen_reward"] == 0
    assert rows[-1][name("accuracy")] > 0.9
    assert rows[-1][name("margin")] > 0.2
    assert rows[-1][name("margin")] == pytest.approx(
        rows[-1][name("chosen_reward")] - rows[-1][name("rejected_reward")], rel=1e-5)


def test_dpo_after_sft(model, tmp_path):
    """The second stage's reference is the first stage's policy, which is not the model that the run began with."""
    path = write(tmp_path, model, runs.sft(), preferences(0, 32), preferences(32, 8))
    rows = train(path, "stages=[{algorithm: {name: sft, prompts_per_step: 4}, steps: 2}, "
                       "{algorithm: {name: dpo, prompts_per_step: 4, prompts_per_update: 2}, steps: 2}]")
    assert rows[2]["val-core/unseen/nll/mean"] < rows[0]["val-core/unseen/nll/mean"] - 0.1
    assert rows[3]["dpo/loss"] < math.log(2) < rows[3]["dpo/loss"] + 0.1
    assert 0 < rows[3]["dpo/margin"] < 0.1


def test_dry_run_counts_pairs(model, tmp_path):
    """Two samples of each row, and the reference's memory."""
    from rlrun.plan import dry_run

    plan = dry_run(*load(write(tmp_path, model, DPO, preferences(0, 16), preferences(16, 8))))
    assert "dpo: 8 steps of 8 prompts, 16 samples" in plan
    assert "ref: 0.00 GB a rank" in plan
    assert "engine" not in plan


def test_a_row_without_rejected(model, tmp_path):
    """It is named before anything is loaded, and so are one that is no text and one that no micro-batch holds."""
    from rlrun.errors import ConfigError

    for value, message in ((None, "no column 'rejected'"), ({"a": 1}, "answers that are texts"), ("x" * 248, "257 tokens")):
        rows = preferences(0, 32)
        rows[17]["rejected"] = value
        with pytest.raises(ConfigError, match=f"rows/18: .*{message}"):
            train(write(tmp_path, model, DPO, rows, preferences(32, 8)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_messages_as_answers(tmp_path):
    """Conversational rows: a prompt of messages, answers of one assistant message each, are the same as their texts."""
    from rlrun.testing.tiny import CHATML

    model = runs.write_model(tmp_path / "chat", chat_template=CHATML)
    plain = preferences(0, 16)
    said = [{"prompt": [{"role": "user", "content": row["prompt"]}],
             **{k: [{"role": "assistant", "content": row[k]}] for k in ("chosen", "rejected")}} for row in plain]
    results = []
    for name, rows in (("plain", plain), ("said", said)):
        (tmp_path / name).mkdir()
        results.append(train(write(tmp_path / name, model, {**DPO, "steps": 2}, rows, preferences(16, 4),
                                   actor={"tokens_per_micro_batch": 512}), "data.max_prompt_tokens=32"))
    assert results[0] == results[1]
