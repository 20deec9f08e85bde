"""Whole runs of what only some algorithms do: dropping groups, greedy baselines, sampling from a cut distribution."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import runs
from locally import train

REWARD = '''
def flat(item):
    return 0.95


def even(item):
    """Flat for prompts with an odd first digit."""
    return sum(map(ord, item.completion)) % 7 / 7 if int(item.prompt[0]) % 2 == 0 else 0.5
'''
NOTE = '''
import json
from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl

@hookimpl
def plugin_info():
    return PluginInfo("note", API_VERSION)

@hookimpl
def compute_metrics(step):
    batch, rows = step.batch, step.batch.sequences
    numbers = [rows["baseline_reward"], rows["reward"], batch.sums(batch.tokens["advantages"]), batch.loss_lengths()]
    with open("{}/notes.jsonl", "a") as file:
        file.write(json.dumps([rows["uid"], *(column.tolist() for column in numbers)]) + "\\n")
    return {{}}
'''


def write(directory, model, reward, steps, **algorithm):
    path = runs.write_run(directory, model, runs.grpo(steps, **algorithm),
                          reward={"kind": "function", "kwargs": {"path": f"{directory / 'own.py'}:{reward}"}})
    (directory / "own.py").write_text(REWARD)
    return path


def test_all_groups_flat_ends_the_run(model, tmp_path, monkeypatch, capsys):
    """DAPO where no prompt has any signal: after max_rounds rounds the run ends with code 1 and says which keys to change."""
    from rlrun.cli import main

    path = write(tmp_path, model, "flat", 3, name="dapo", max_rounds=2, on_empty="stop")
    monkeypatch.setattr(sys, "argv", ["rl-run", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "step 1: after stages.0.algorithm.max_rounds = 2 rounds no sample is left to train on" in said
    assert "stages.0.algorithm.on_empty=skip" in said
    assert not runs.checkpoints(tmp_path / "run")


def test_all_groups_flat_is_skipped_and_counted(model, tmp_path):
    """Steps of one prompt and one round: those with a flat prompt are skipped, counted, and change no weight. A stage without any
    other step ends with an error."""
    from rlrun.errors import RunError

    path = write(tmp_path, model, "even", 8, name="dapo", prompts_per_step=1, max_rounds=1, mask_truncated=False)
    rows = train(path)
    trained = ["actor/lr" in row for row in rows]
    assert 0 < sum(trained) < 8
    assert [row["rollout/kept_groups_ratio"] for row in rows] == [float(t) for t in trained]
    assert [row["training/skipped_steps"] for row in rows] == [trained[: i + 1].count(False) for i in range(8)]
    assert all(row["rollout/rounds"] == 1 for row in rows)
    with pytest.raises(RunError, match="stage 0 changed no model"):
        train(write(tmp_path / "flat", model, "flat", 2, name="dapo", max_rounds=2))
    assert runs.metrics(tmp_path / "flat" / "run")[0]["rollout/rounds"] == 2


def test_dynamic_sampling_fills_the_batch(model, tmp_path):
    """With rounds enough every step trains on as many prompts as asked for, none of them flat."""
    path = write(tmp_path, model, "even", 2, name="dapo", max_rounds=8, mask_truncated=False)
    for row in train(path):
        assert row["rollout/rounds"] > 1
        assert row["rollout/kept_groups_ratio"] < 1
        assert row["critic/advantages/max"] > 0


def test_steps_of_truncated_samples_alone_are_empty(model, tmp_path):
    """Where overlong filtering leaves no token the step is skipped and counted, not an update by the optimizer's momentum."""
    from rlrun.errors import RunError

    path = write(tmp_path, model, "even", 1, mask_truncated=True)
    with pytest.raises(RunError, match="changed no model"):
        train(path, "rollout.max_new_tokens=1")


def test_remax_takes_the_greedy_completion_as_baseline(model, tmp_path):
    """arXiv 2310.10505: with one sample a prompt, reward less that of the prompt's greedy completion, which is that of greedy
    validation with the same weights; it counts in no metric of the samples."""
    (tmp_path / "note.py").write_text(NOTE.format(tmp_path))
    questions = {"kind": "jsonl", "path": str(tmp_path / "train.jsonl")}
    path = runs.write_run(tmp_path, model, runs.grpo(1, name="remax", prompts_per_step=6), rollout={"samples_per_prompt": 1},
                          data={"train": [questions]})
    [row] = train(path, add=[str(tmp_path / "note.py")])
    [[uids, baselines, rewards, advantages, lengths]] = map(json.loads, (tmp_path / "notes.jsonl").open())
    asked = [json.loads(line) for line in (tmp_path / "train.jsonl").open()]
    (tmp_path / "greedy.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    held_out = {"validation": [{"kind": "jsonl", "path": str(tmp_path / "greedy.jsonl")}],
                "train": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "others.jsonl", 12, 60))}]}
    runs.write_run(tmp_path / "greedy", model, runs.grpo(1), data=held_out, validation={"at_start": True})
    train(tmp_path / "greedy" / "config.yaml")
    records = [json.loads(line) for line in (tmp_path / "greedy" / "run" / "rollouts" / "validation_000000.jsonl").open()]
    greedy = {record["uid"].rpartition("/")[2]: record["reward"] for record in records}
    assert baselines == pytest.approx([greedy[uid.rpartition("/")[2]] for uid in uids])
    assert len(set(baselines)) > 1
    assert advantages == pytest.approx([(r - b) * n for r, b, n in zip(rewards, baselines, lengths)], abs=1e-5)
    assert row["critic/score/mean"] == pytest.approx(sum(rewards) / 6)


def test_correction_lets_sampling_be_cut(model, tmp_path):
    """On the engine's own distribution the weights are 1; with top_p they are those of the cut distribution, below 1: its tokens
    are likelier than in the trainer's."""
    path = runs.write_run(tmp_path, model, runs.grpo(1, correction="token_tis"))
    [whole] = train(path)
    [cut] = train(path, "run.name=cut", "rollout.top_p=0.5", "rollout.top_k=50")
    assert whole["correction/weight"] == pytest.approx(1, abs=1e-4)
    assert whole["correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert cut["correction/weight"] < 0.6
    assert cut["correction/rejected"] == 0


def test_the_documented_presets_are_those_of_the_code():
    """docs/algorithms.md lists every preset with exactly what it sets."""
    from rlrun.algorithms.presets import PRESETS

    text = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text().partition("## Advantages")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| ", text, re.MULTILINE))
    listed = {name: dict(re.findall(r"`(\w+): ([^`]+)`", sets)) for name, sets in rows.items()}
    assert listed.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        values = {k: float(v) if isinstance(preset.get(k), float) else v for k, v in listed[name].items()}
        assert values == {k: str(v).lower() if isinstance(v, bool) else v for k, v in preset.items()}
