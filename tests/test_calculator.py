"""The calculator recipe: a policy that uses a tool learns over two turns."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import runs
from locally import load, train

from rlrun.rewards.function import load_file
from rlrun.rewards.protocol import RewardItem

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The recipe's configuration for one rank here, with model and data beside it."""
    folder = tmp_path_factory.mktemp("calculator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["calculator.py", str(folder)])
        runpy.run_path(str(EXAMPLES / "calculator.py"), run_name="__main__")
    text = (EXAMPLES / "calculator.yaml").read_text().replace("build/calculator", str(folder))
    (folder / "calculator.yaml").write_text(text.replace("dir: runs", f"dir: {folder}"))
    return folder / "calculator.yaml"


@pytest.fixture(scope="module")
def calculator():
    return load_file("calculator_example", str(EXAMPLES / "calculator.py"))


LOCAL = (f"plugins=[fsdp, {EXAMPLES / 'calculator.py'}]", "resources.train_ranks=1", "resources.launcher=local",
         "trainer.trackers=[]")


@pytest.mark.parametrize("expression, value", [
    ("12*7", "84"), (" 1 + 2 * (3 - 4) ", "-1"), ("7/2", "3.5"), ("8/4", "2"), ("17 % 5", "2"), ("-(2)//3", "-1"),
    ("1e3", "1000"), ("9" * 60 + "*" + "9" * 60, str((10**60 - 1) ** 2)),
])
def test_values(calculator, expression, value):
    assert calculator.evaluate(expression) == value


@pytest.mark.parametrize("expression", [
    "", "1/0", "2**9999", "9**9**9", "abs(1)", "__import__('os')", "a", "'x'*9", "True", "[1]", "1 if 1 else 2", "1+", "(" * 150,
    "1" * 201, "1j", "1<2", "lambda: 1", "(1).real",
])
def test_refuses(calculator, expression):
    """Nothing but numbers and signs is worked out, and nothing that would take long."""
    with pytest.raises(ValueError):
        calculator.evaluate(expression)


def test_episode(calculator):
    tool = calculator.Calculator(answer="result")
    sample = RewardItem("12*7=", "", "ignored", "q", {"result": "84"})
    state, talk = tool.reset(sample), [{"role": "user", "content": "12*7="}]

    def say(text):
        return tool.step(state, [*talk, {"role": "assistant", "content": text}])

    assert say("<calc>12*7</calc>") == ([{"role": "tool", "content": "84"}], {"score": 0.0}, False)
    assert say("<calc>x</calc>")[0] == [{"role": "tool", "content": "error: only numbers and + - * / // % ( )"}]
    assert say(" 84.0 ")[1:] == ({"score": 1.0, "correct": 1.0, "calls": 1, "pred": "84.0"}, True)
    assert say("<calc>1")[1]["score"] == 0.0
    with pytest.raises(ValueError, match="no column 'result'; it has none"):
        tool.reset(RewardItem("", "", "", ""))
    assert [calculator.equal(*pair) for pair in (("a", "a"), ("7", "7.0"), ("", "0"), ("nan", "7"))] == [True, True, False, False]


def test_demonstrations_are_what_a_run_makes(recipe):
    """A demonstration's tokens are those of an episode in which the policy says the same, and all questions are distinct."""
    from rlrun.data.prompts import encode_answers, load_data
    from rlrun.environments.turns import Episode, Part, continuation
    from rlrun.models.folder import load_tokenizer

    config, plugins = load(recipe, *LOCAL)
    tokenizer = load_tokenizer(config.model.path)
    data = load_data(config.data, tokenizer, plugins)
    assert not data.counts.get("in_validation")
    sample = data.train[0][0]
    call = tokenizer(f"<calc>{sample.prompt.rstrip('=')}</calc>")["input_ids"]
    episode = Episode(0, sample, "")
    for ids in ([*call, 1], continuation(tokenizer, [{"role": "tool", "content": sample.extra["result"]}], 1, [1]),
                [*tokenizer(sample.extra["result"])["input_ids"], 1]):
        episode.parts.append(Part("policy", tuple(ids), (), ""))
    assert episode.stream == (*sample.prompt_ids, *encode_answers(tokenizer, [sample.answer])[0])


def test_two_steps(recipe):
    """Supervised, then GRPO, with validation by answers and by episodes."""
    rows = train(recipe, *LOCAL, "run.name=short", "stages.0.steps=1", "stages.1.steps=2", "validation.every=0",
                 "stages.0.optim.warmup_steps=0", "actor.optim.warmup_steps=0", "stages.1.algorithm.prompts_per_step=4")
    assert len(rows) == 3
    assert {"val-core/unseen/nll/mean", "val-core/unseen/acc/mean@1"} <= rows[0].keys()
    assert "val-core/unseen/acc/mean@1" in rows[2]
    assert rows[2]["rollout/turns/mean"] >= 1


@pytest.mark.slow
def test_it_learns_over_two_turns(recipe):
    """GRPO raises the share of unseen sums that come out right, with the tool used in nearly every episode."""
    train(recipe, *LOCAL, "trainer.dump_rollouts_every=10")
    run = recipe.parent / "calculator-0"
    rows = runs.metrics(run)
    accuracy = [row["val-core/unseen/acc/mean@1"] for row in rows if "val-core/unseen/acc/mean@1" in row]
    stages = [row["training/stage"] for row in rows if "val-core/unseen/acc/mean@1" in row]
    warm = accuracy[stages.index(1) - 1]
    assert accuracy[-1] > warm + 0.1, accuracy
    assert rows[-1]["rollout/turns/mean"] > 1.8
    last = [json.loads(line) for line in (run / "rollouts" / f"step_{len(rows):06d}.jsonl").open()]
    used = [r for r in last if len(r.get("turns", [])) == 3]
    assert len(used) > 0.8 * len(last)
    assert all(r["turns"][0]["text"].startswith("<calc>") for r in used)
