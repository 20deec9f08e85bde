import logging
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlrun.config.schema import RewardConfig, RewardPart
from rlrun.rewards.pool import RewardPool, part_specs
from rlrun.rewards.protocol import RewardItem

RESOLVE = {
    "function": "rlrun.rewards.function:FunctionReward",
    "math_verify": "rlrun.rewards.math_verify:MathVerifyReward",
    "reasoning_gym": "rlrun.rewards.reasoning_gym:ReasoningGymReward",
}

REWARDS = '''
import os, signal, subprocess, sys, time

def length(item, scale=1.0):
    return scale * len(item.completion)

def act(item):
    """Does what the completion says."""
    what = item.completion
    if what == "sleep":
        time.sleep(3600)
    if what == "sleep with child":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"])
    if what == "stuck":
        import re; re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "raise":
        raise KeyError("no such thing")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(3)
    if what == "alarm":
        signal.alarm(0)
    if what == "print":
        print("noise")
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "good", "empty": {}, "true": True,
            "modules": float("torch" in sys.modules or "ray" in sys.modules or "transformers" in sys.modules),
            "pid": float(os.getpid())}.get(what, 1.0)

def rich(item):
    return {"score": 0.4, "correct": 1, "format": 0.5, "pred": 42}

class Counted:
    def __init__(self, start):
        if start < 0:
            raise RuntimeError("start must not be negative")
        self.start = start
    def __call__(self, item):
        return self.start + len(item.completion)
'''


def item(completion, answer="", source="test", **extra):
    return RewardItem("question", completion, answer, source, extra)


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def make(rewards):
    pools = []

    def build(name="act", parts=(), resolve=RESOLVE, files=(), kwargs=None, **config):
        config = {"timeout_s": 2.0, **config}
        if not parts:
            config |= {"kind": "function", "kwargs": {"path": f"{rewards}:{name}", **(kwargs or {})}}
        config = RewardConfig(parts=list(parts), **config)
        pools.append(RewardPool(config, part_specs(config, resolve), files))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def workers():
    """Scoring processes: children that were not there before the first test of this file."""
    return [p for p in psutil.Process().children(recursive=True)
            if p.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(p.cmdline()) and p not in OTHERS]


OTHERS = []


@pytest.fixture(autouse=True, scope="module")
def _others():
    OTHERS[:] = psutil.Process().children(recursive=True)


def test_scores_come_in_order_from_a_process_without_heavy_imports(make):
    pool = make("length", kwargs={"scale": 0.5}, processes=2)
    tickets = pool.submit([item("a" * n) for n in range(50)])
    assert [s.reward for s in pool.collect(tickets[::-1])] == [0.5 * n for n in range(50)][::-1]
    assert make().score([item("modules"), item("true")])[0].reward == 0.0


@pytest.mark.parametrize("what, error", [
    ("raise", "function: KeyError: 'no such thing'"),
    ("nan", "function: ValueError: the reward returned a score that is not finite: nan"),
    ("inf", "function: ValueError: the reward returned a score that is not finite: inf"),
    ("none", "function: TypeError: the reward returned score = None, which is no number but NoneType"),
    ("text", "function: TypeError: the reward returned score = 'good', which is no number but str"),
    ("empty", "function: ValueError: the reward returned no 'score', only []"),
    ("exit", "function: SystemExit: 3"),
    ("die", "crash: the scoring process died (exit code -9)"),
])
def test_no_score_is_named_once_and_counted(make, caplog, what, error):
    """Case 20, 21: an exception, a crash or a value that is no score is never a silent 0."""
    pool = make()
    with caplog.at_level(logging.WARNING):
        scores = pool.score([item("fine"), item(what), item("fine"), item(what)])
    assert [(s.reward, s.error) for s in scores] == [(1.0, None), (0.0, error), (1.0, None), (0.0, error)]
    assert [s.correct for s in scores] == [1.0, 0.0, 1.0, 0.0]
    assert sum(pool.errors.counts.values()) == 2
    assert len(pool.errors.counts) == 1
    assert len([r for r in caplog.records if error in r.getMessage()]) == 1
    assert pool.score([item("fine")])[0].reward == 1.0


def test_drop_and_raise(make):
    dropped = make(on_error="drop").score([item("raise"), item("fine")])
    assert [s.reward for s in dropped] == [None, 1.0]
    with pytest.raises(RuntimeError, match=r"(?s)KeyError.*begins 'raise'.*on_error.*Traceback.*rewards.py"):
        make(on_error="raise").score([item("raise")])


@pytest.mark.parametrize("what", ["sleep", "sleep with child", "stuck"])
def test_a_reward_that_hangs_is_killed_and_only_its_sample_is_flagged(make, what):
    """Case 22: a reward that sleeps for ever, waits for a child, or never lets go of the interpreter."""
    pool = make()
    pool.score([item("fine")] * 100)
    began = time.monotonic()
    scores = pool.score([item("fine")] * 5 + [item(what)] + [item("fine")] * 10)
    assert time.monotonic() - began < 10
    assert [i for i, s in enumerate(scores) if s.error] == [5]
    assert scores[5].error == "time-out: no score within 2 s"
    assert [s.reward for s in scores] == [1.0] * 5 + [0.0] + [1.0] * 10
    assert [s.reward for s in pool.score([item("fine")] * 3)] == [1.0] * 3
    pool.close()
    assert not workers()


def test_processes_that_die_while_idle_are_replaced(make):
    pool = make()
    pid = int(pool.score([item("pid")])[0].reward)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert pool.score([item("fine")])[0].reward == 1.0
    assert int(pool.score([item("pid")])[0].reward) != pid


def test_weighted_sum_logs_each_part(make, rewards):
    parts = [
        RewardPart(kind="function", weight=2.0, kwargs={"path": f"{rewards}:rich"}),
        RewardPart(kind="function", weight=-0.25, kwargs={"path": f"{rewards}:Counted", "start": 3}),
    ]
    (score,) = make(parts=parts).score([item("ab")])
    assert score.reward == pytest.approx(2 * 0.4 - 0.25 * 5)
    assert score.parts == {"function": 0.4, "function/format": 0.5, "function_2": 5.0}
    assert (score.correct, score.pred) == (1.0, "42")


def test_two_parts_with_answers(make, rewards):
    """What validation reads is the first part's, and no number to log of either."""
    rich = RewardPart(kind="function", kwargs={"path": f"{rewards}:rich"})
    (score,) = make(parts=[rich, rich]).score([item("ab")])
    assert score.parts == {"function": 0.4, "function/format": 0.5, "function_2": 0.4, "function_2/format": 0.5}
    assert (score.correct, score.pred) == (1.0, "42")


def test_a_name_that_a_function_does_not_take_is_an_error_at_once(make, rewards):
    with pytest.raises(ValueError, match="unexpected keyword argument 'colour'"):
        make(parts=[RewardPart(kind="function", kwargs={"path": f"{rewards}:rich", "colour": 1})]).score([item("ab")])


def test_a_reward_that_cannot_be_made_is_an_error_at_once(make, rewards):
    began = time.monotonic()
    with pytest.raises(ValueError, match="start must not be negative"):
        make("Counted", kwargs={"start": -1})
    with pytest.raises(ValueError, match="has no 'absent'"):
        make("absent")
    assert time.monotonic() - began < 20
    assert not workers()


def test_math_verify_in_the_pool(make):
    """Case 21: its own time limits would need the main thread; the pool keeps the time."""
    pool = make(parts=[RewardPart(kind="math_verify")], timeout_s=10)
    scores = pool.score([item(r"\boxed{1/3}", "1/3"), item(r"\boxed{1/2}", "1/3"), item("3", "####")])
    assert [s.reward for s in scores] == [1.0, 0.0, 0.0]
    assert [s.pred for s in scores] == ["1/3", "1/2", None]
    assert scores[2].error == "math_verify: ValueError: math_verify cannot read the reference answer '####'"


def test_rewards_of_a_plugin_that_is_a_file(make, tmp_path):
    """Case 104: a reward of a -p file is found in the scoring processes, and in those that replace one that was killed."""
    (tmp_path / "mine.py").write_text("import time\nclass Mine:\n    def __init__(self, x): self.x = x\n"
                                      "    def __call__(self, item):\n"
                                      "        time.sleep(1e6 if item.completion == 'hang' else 0)\n        return self.x\n")
    pool = make(parts=[RewardPart(kind="mine", kwargs={"x": 7})], resolve={"mine": "mine:Mine"},
                files=[("mine", str(tmp_path / "mine.py"))])
    assert pool.score([item("")])[0].reward == 7.0
    before = {p.pid for p in workers()}
    assert pool.score([item("hang")])[0].error is not None
    assert pool.score([item("")])[0].reward == 7.0
    assert {p.pid for p in workers()} != before


def test_thousands_of_fast_samples_take_no_time(make):
    pool = make("length")
    pool.score([item("ab")] * 320)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        pool.score([item("ab")] * 320)
        times.append(time.perf_counter() - began)
    print(times)
    assert min(times) < 0.05


DRIVER = '''
import os, sys, time
sys.path.insert(0, {tests!r})
print("main runs", flush=True)
from rlrun.config.schema import RewardConfig
from rlrun.rewards.pool import RewardPool, part_specs
from rlrun.rewards.protocol import RewardItem
config = RewardConfig(kind="function", kwargs={{"path": {path!r} + ":act"}}, processes=2)
pool = RewardPool(config, part_specs(config, {{"function": "rlrun.rewards.function:FunctionReward"}}))
pool.submit([RewardItem("", "sleep", "", "")])
pool.submit([RewardItem("", "print", "", "")])
print("ready", flush=True)
time.sleep(3600)
'''


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_die_with_the_driver(rewards, how):
    """Case 114: nothing is left of the pool, however the driver ends; its unguarded main script runs once."""
    script = rewards.with_name("driver.py")
    script.write_text(DRIVER.format(tests=str(rewards.parent), path=str(rewards)))
    # a shell's background jobs ignore SIGINT, and so do their children unless told otherwise
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert [driver.stdout.readline() for _ in range(2)] == ["main runs\n", "ready\n"]
    time.sleep(0.5)
    children = psutil.Process(driver.pid).children(recursive=True)
    assert len(children) >= 2
    driver.send_signal(how)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    out, _ = driver.communicate(timeout=10)
    assert out == ""
