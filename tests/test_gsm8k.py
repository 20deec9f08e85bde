"""GSM8K's own files: every row is used, right answers score 1 and wrong ones 0, with the settings of the recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlrun.config.load import load_config
from rlrun.data.prompts import load_data
from rlrun.rewards.math_verify import MathVerifyReward
from rlrun.rewards.protocol import RewardItem
from rlrun.testing.tiny import CHATML, build_tokenizer

RECIPE = Path(__file__).parents[1] / "examples" / "gsm8k.yaml"
GSM8K = os.environ.get("RLRUN_GSM8K")

AWKWARD = ["18", "0", "-7", "1,600", "1,450,000", "-1,200", "2.50", "0.75", "12,345.67", "$18", "$1,080", "$2.50"]
"""Final answers: with a sign, thousands, decimals, a currency."""
DISTRACTING = {
    "To get the final answer, add the fee: $3.00 + $5.00 = $<<3+5=8.00>>8.00": 8,
    "We found the answer in days: 42 days / 7 days/week = <<42/7=6>>6 weeks": 6,
    "The answer is rounded down: 40 eggs / 120 eggs * 100% = 33.333...%": 33,
}
"""Last lines of solutions in which math_verify finds answers of its own."""


def write(directory: Path, answers: list[str]) -> Path:
    """train.jsonl and test.jsonl in GSM8K's format, with these solutions."""
    for part in ("train", "test"):
        rows = [{"question": f"Ann\u2019s ducks ({part}, {n}): how much?", "answer": answer} for n, answer in enumerate(answers)]
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def load(directory: Path):
    """The recipe and its data, as a tokenizer that goes byte by byte sees them."""
    config, plugins = load_config(RECIPE, [f"data.train.0.path={directory}/train.jsonl",
                                           f"data.validation.0.path={directory}/test.jsonl"], ["fsdp"])
    tokenizer = build_tokenizer(["<|user|>", "<|assistant|>"], CHATML)
    return config, load_data(config.data, tokenizer, plugins)


def scores(config, samples, completion) -> list[float]:
    """What the recipe's reward gives for `completion(solution)` to each sample."""
    reward = MathVerifyReward(**config.reward.kwargs)
    return [reward(RewardItem(str(s.prompt), completion(s.answer), s.answer, s.data_source))["score"] for s in samples]


def final(solution: str) -> str:
    return solution.rpartition("####")[2].strip()


PERFECT = {
    "the solution": lambda solution: solution,
    "boxed": lambda solution: f"So it is $\\boxed{{{final(solution)}}}$.",
    "a sentence": lambda solution: f"The answer is {final(solution)}.",
    "without thousands": lambda solution: f"#### {final(solution).replace(',', '')}",
}


def other(solution: str) -> str:
    return f"The answer is {float(final(solution).replace(',', '').replace('$', '')) + 1:g}."


@pytest.fixture
def awkward(tmp_path):
    return load(write(tmp_path, [f"So much.\n#### {a}" for a in AWKWARD] + [
        f"{line}\n#### {n}" for line, n in DISTRACTING.items()]))


def test_rows_of_the_format(awkward):
    config, data = awkward
    assert config.reward.kind == "math_verify"
    assert [len(data.train[0]), len(data.validation), data.counts] == [15, 15, {"rows": 30}]
    assert {final(sample.answer) for sample in data.validation} >= set(AWKWARD)


@pytest.mark.parametrize("form", PERFECT)
def test_awkward_answers(awkward, form):
    config, data = awkward
    assert scores(config, data.validation, PERFECT[form]) == [1.0] * 15


def test_wrong_answers(awkward):
    config, data = awkward
    assert scores(config, data.validation, other) == [0.0] * 15
    assert scores(config, data.validation, lambda solution: "I do not know.") == [0.0] * 15


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K, reason="RLRUN_GSM8K names no folder with GSM8K's train.jsonl and test.jsonl")
def test_the_real_files():
    """No row is lost of 7,473 and 1,319; each test row's solution, and its answer in other forms, scores 1; one more scores 0."""
    config, data = load(Path(str(GSM8K)))
    assert [len(data.train[0]), len(data.validation), data.counts] == [7473, 1319, {"rows": 8792}]
    found = {form: sum(scores(config, data.validation, completion)) for form, completion in PERFECT.items()}
    print(f"{len(data.train[0])} + {len(data.validation)} rows, {data.counts}; scored 1.0: {found}")
    assert found == dict.fromkeys(PERFECT, 1319.0)
    assert sum(scores(config, data.validation, other)) == 0
