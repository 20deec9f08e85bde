"""The built-in environments, and how a conversation becomes one stream of tokens."""

from __future__ import annotations

import pytest

from rlrun.config.schema import RewardConfig
from rlrun.data.sample import Sample
from rlrun.environments.protocol import Answer, Turn
from rlrun.environments.turns import Episode, combined, continuation
from rlrun.errors import RunError
from rlrun.rewards.pool import RewardPool
from rlrun.rewards.protocol import RewardItem, Score
from rlrun.rewards.scoring import PartSpec
from rlrun.rollout.protocol import Completion
from rlrun.testing.tiny import CHATML, build_tokenizer

QWEN = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + "
    "'\n</tool_response><|im_end|>\n' }}{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TOOL = [{"role": "tool", "content": "84"}]


def test_continuation_is_what_the_template_puts_between():
    """Prompt, reply and continuation are the rendering of the whole conversation, token by token, for a reply that the
    policy ended itself and for one that a stop string ended."""
    for template, end in ((CHATML, "<eos>"), (QWEN, "<|im_end|>")):
        marks = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|tool|>", "<|assistant|>"]
        tokenizer = build_tokenizer(marks, template)
        asked = [{"role": "user", "content": "12*7="}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": "hm"}, *TOOL], add_generation_prompt=True, return_dict=False)
        [eos] = tokenizer(end)["input_ids"]
        reply = tokenizer("hm")["input_ids"]
        for drawn in ([*reply, eos], reply):
            assert [*prompt, *drawn, *continuation(tokenizer, TOOL, drawn[-1], [eos])] == whole


def test_continuation_of_plain_text_and_of_templates_that_cannot():
    tokenizer = build_tokenizer()
    assert tokenizer.decode(continuation(tokenizer, [*TOOL, *TOOL], 1, [1])) == "8484"
    forgets = build_tokenizer(chat_template="{{ messages[-1].content }}")
    with pytest.raises(RunError, match="leaves out an assistant message"):
        continuation(forgets, TOOL, 1, [1])
    strict = build_tokenizer(chat_template="{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}")
    with pytest.raises(RunError, match=r"cannot render.*no tools"):
        continuation(strict, TOOL, 1, [1])


def test_an_episode_is_its_parts():
    episode = Episode(0, Sample("q/1", "12*7=", (5, 6), "84", "q"), "key")
    episode.reply(Completion(0, (7, 8, 1), (-1.0, -2.0, -3.0), "stop", 4), "hm", 9)
    assert (episode.finish_reason, episode.item().prompt, episode.turn().first) == ("stop", "12*7=", True)
    episode.reply(Completion(0, (7, 8, 9), (-1.0, -2.0, -3.0), "stop", 4), "ok", 2)
    assert (episode.stream, episode.loss_mask) == ((5, 6, 7, 8, 1, 7, 8), [True] * 5)
    assert episode.log_probs == [-1.0, -2.0, -3.0, -1.0, -2.0]
    assert (episode.finish_reason, episode.policy_version, episode.turn().first) == ("length", 4, False)
    assert episode.item() == RewardItem(
        [{"role": "user", "content": "12*7="}, {"role": "assistant", "content": "hm"}], "ok", "84", "q")


def test_scores_add_up():
    """Rewards of steps and of sources; a step that failed is all that counts; a source without a score drops the sample."""
    episode = Episode(0, Sample("q/1", "", (5,), "", "q"), "key")
    episode.add_score(Answer(0.25, 0.0, {"environment/n": 1.0}))
    episode.add_score(Answer(0.5, 1.0, {"environment/n": 2.0}, "x"))
    assert episode.score == Score(0.75, 1.0, {"environment": 0.75, "environment/n": 2.0}, "x")
    pooled, failed, dropped = Score(2.0, 0.5, {"function": 1.0}), Score(0.0, 0.0, error="e"), Score(None, 0.0, error="e")
    assert combined([episode.score, pooled]) == Score(
        2.75, 1.0, {"environment": 0.75, "environment/n": 2.0, "function": 1.0}, "x")
    assert combined([failed, pooled]) == Score(2.0, 0.0, {"function": 1.0}, None, "e")
    assert combined([pooled, dropped]).reward is None
    episode.add_score(Score(0.0, 0.0, error="e"))
    assert episode.score == Score(0.0, 0.0, error="e")


SPITEFUL = '''
import asyncio, time

class Spiteful:
    def reset(self, sample):
        return []

    async def step(self, state, messages):
        await asyncio.sleep(0)
        text = messages[-1]["content"]
        if text == "hang":
            time.sleep(60)
        if text == "die":
            import os; os._exit(3)
        state.append(text)
        answers = {"nan": float("nan")}
        if text == "raise":
            raise KeyError("on purpose")
        if text == "silent":
            return [], 0.0, False
        if text == "strange":
            return ["x"], 0.0, False
        if text == "unpicklable":
            state.append(lambda: 0)
        return [{"role": "tool", "content": str(state)}], answers.get(text, 0.5), text == "end"
'''


def test_what_an_environment_does_wrong_ends_alone(tmp_path):
    """Exceptions, hangs, crashes and nonsense end one episode, as reward.on_error says; others go on. States travel."""
    (tmp_path / "spiteful.py").write_text(SPITEFUL)
    for how in ("zero", "drop"):
        pool = RewardPool(RewardConfig(timeout_s=1.0, on_error=how), [PartSpec("environment", "spiteful:Spiteful", 1.0, {})],
                          [("spiteful", str(tmp_path / "spiteful.py"))])
        wrong = ["raise", "nan", "silent", "strange"] + (["hang", "die", "unpicklable"] if how == "zero" else [])
        texts = ["go", *wrong, "end"]
        try:
            answers = pool.score([Turn("q", t, "", "s", {}, [{"role": "assistant", "content": t}]) for t in texts])
            more = [{"role": "assistant", "content": "more"}]
            again = pool.score([Turn("q", "more", "", "s", {}, more, answers[0].state, first=False)])
        finally:
            pool.close()
        assert [a.reward for a in answers] == [0.5, *[0.0 if how == "zero" else None] * len(wrong), 0.5]
        assert [isinstance(a, Answer) for a in answers] == [True, *[False] * len(wrong), True]
        assert all(a.error for a in answers[1:-1])
        assert (answers[0].done, answers[-1].done, answers[0].state) == (False, True, ["go"])
        assert again[0].messages == [{"role": "tool", "content": "['go', 'more']"}]


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    from rlrun.rewards.reasoning_gym import ReasoningGymEnvironment

    environment = ReasoningGymEnvironment()
    entry = {"question": "q", "answer": "cba", "metadata": {"source_dataset": "spell_backward"}}
    state = environment.reset(RewardItem("q", "", "cba", "s", {"reasoning_gym": {"dataset": "spell_backward", "entry": entry}}))
    messages, outcome, done = environment.step(state, [{"role": "assistant", "content": "cba"}])
    assert (messages, outcome["score"], done) == ([], 1.0, True)
