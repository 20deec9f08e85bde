import threading

import pytest
import reasoning_gym

from rlrun.rewards.function import FunctionReward
from rlrun.rewards.math_verify import MathVerifyReward
from rlrun.rewards.protocol import RewardItem
from rlrun.rewards.reasoning_gym import ReasoningGymReward


def item(completion, answer, **extra):
    return RewardItem("question", completion, answer, "test", extra)


@pytest.mark.parametrize("completion, answer, score", [
    (r"So it is \boxed{1/3}.", "1/3", 1.0),
    (r"So it is \boxed{1/3}.", r"\frac{1}{3}", 1.0),
    (r"\boxed{\frac{2}{6}}", r"$\frac{1}{3}$", 1.0),
    (r"\boxed{1/3}", r"thus \boxed{\frac13}", 1.0),
    (r"\boxed{0.25}", "1/3", 0.0),
    ("The answer is 72.", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 1.0),
    ("The answer is 24.", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 0.0),
    ("It costs $4.00 + $2.00 = $<<4+2=6.00>>6.00\n#### 6", "#### 6", 1.0),
    ("It costs 6 dollars, and 7 more\n#### 13", "#### 6", 0.0),
    ("It is \\boxed{6}.\n#### 2 ways to see it", "#### 6", 1.0),
    ("I do not know", 7, 0.0),
    (r"\boxed{1,234}", "1234", 1.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
])
def test_math_verify(completion, answer, score):
    """Case 21: 1/3 in a box scores 1."""
    result = MathVerifyReward()(item(completion, answer))
    assert (result["score"], result["correct"]) == (score, score)


def test_math_verify_works_in_any_thread_and_names_a_bad_reference():
    """Case 21: no signals; a reference that cannot be read is no silent 0."""
    found = []
    reward = MathVerifyReward()
    thread = threading.Thread(target=lambda: found.append(reward(item(r"\boxed{1/3}", "1/3"))))
    thread.start()
    thread.join()
    assert found == [{"score": 1.0, "correct": 1.0, "pred": "1/3"}]
    with pytest.raises(ValueError, match="cannot read the reference"):
        reward(item("3", "#### "))


def test_reasoning_gym_scores_with_the_datasets_own_scorer():
    entry = reasoning_gym.create_dataset("spell_backward", size=1, seed=0)[0]
    reward = ReasoningGymReward()
    extra = {"reasoning_gym": {"dataset": "spell_backward", "entry": entry}}
    full = reward(item(f" {entry['answer']}\n", None, **extra))
    assert full == {"score": 1.0, "correct": 1.0, "pred": entry["answer"]}
    half = reward(item(entry["answer"][0], None, **extra))
    assert 0 < half["score"] < 1
    assert half["correct"] == 0
    exported = item(entry["answer"], entry["answer"], metadata=entry["metadata"])
    assert reward(exported)["score"] == 1.0
    tagged = ReasoningGymReward(tag="answer")
    assert tagged(item(f"so <answer>{entry['answer']}</answer>.", None, **extra))["score"] == 1.0
    assert tagged(item(entry["answer"], None, **extra))["score"] == 0.0
    with pytest.raises(ValueError, match="not a sample of reasoning_gym"):
        reward(item("x", "y"))


def test_function_by_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def good(item, factor=1): return factor * len(item.completion)\nvalue = 3\n")
    assert FunctionReward(f"{tmp_path}/mine.py:good", factor=2)(item("abc", "")) == 6
    assert FunctionReward("rlrun.rewards.math_verify:MathVerifyReward", marker="=>")(item("4", "=> 4"))["score"] == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert FunctionReward("mine:good")(item("abc", "")) == 3
    for path, message in [("mine.py", "must look like"), ("absent.py:good", "no file"), ("mine.py:bad", "no 'bad'"),
                          ("mine.py:value", "not a function")]:
        with pytest.raises(ValueError, match=message):
            FunctionReward(path)
