"""The transformers rollout: what it draws, with which probability, and where it ends."""

from types import SimpleNamespace

import pytest
import torch

from rlrun.rollout.hf import HfRollout, draw, position_ids, uniforms
from rlrun.rollout.protocol import Request, SamplingParams
from rlrun.testing.tiny import save_tiny


def engine(tmp_path, kind="llama", max_sequences=64, **sizes):
    model = save_tiny(tmp_path / kind, kind, seed=3, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                      num_attention_heads=2, **sizes)
    config = SimpleNamespace(model=SimpleNamespace(path=str(tmp_path / kind), tokenizer=None, dtype="float32"),
                             rollout=SimpleNamespace(engine_args={"max_num_seqs": max_sequences}))
    rollout = HfRollout(config, torch.device("cpu"), 0)
    rollout.load_weights(model.state_dict().items(), 7)
    return rollout, model


PROMPTS = [(5, 6, 7, 8, 9), (40,), (5, 6, 7, 8, 9), (100, 30, 12)]


def requests(prompts=PROMPTS):
    return [Request(i, p, f"key{i}") for i, p in enumerate(prompts)]


def params(**changes):
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": 6, "eos_ids": (1,), "seed": 0, **changes})


def reference_log_probs(model, prompt, ids, temperature):
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_log_probs_with_learned_positions(tmp_path):
    """Cases 28 and 29: every log-prob equals an unpadded forward's at the same temperature, also where positions are learned."""
    rollout, model = engine(tmp_path, "gpt2")
    for completion in rollout.generate(requests(), params(temperature=0.7)):
        expected = reference_log_probs(model, PROMPTS[completion.index], completion.ids, 0.7)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_position_ids_ignore_padding():
    """Case 28: positions start at 0 at the first real token."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_what_is_drawn_depends_on_the_key_alone(tmp_path):
    """Case 17b: not on the order of requests, the batch's size, or the company; another seed draws other samples."""
    rollout, _ = engine(tmp_path)
    alone = {r.index: rollout.generate([r], params())[0].ids for r in requests()}
    together = {c.index: c.ids for c in rollout.generate(requests()[::-1], params())}
    rollout.max_sequences = 2
    in_pairs = {c.index: c.ids for c in rollout.generate(requests(), params())}
    assert alone == together == in_pairs
    assert alone[0] != alone[2], "samples of one prompt differ by their key"
    assert {c.index: c.ids for c in rollout.generate(requests(), params(seed=1))} != alone


def test_draws_follow_the_distribution():
    """Frequencies of 40,000 draws at T = 0.5 within four standard errors; a token of probability 0 never."""
    logits = torch.tensor([[2.0, 0.0, -1.0, -torch.inf]])
    n = 40_000
    noise = uniforms([f"k{i}" for i in range(n)], params(max_new_tokens=1), torch.device("cpu"))[:, 0]
    tokens, log_probs = draw(logits.expand(n, -1), noise, params(temperature=0.5))
    p = (logits[0] / 0.5).softmax(-1)
    frequency = torch.bincount(tokens, minlength=4) / n
    assert ((frequency - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all()
    torch.testing.assert_close(log_probs, p.log()[tokens])
    extreme, _ = draw(logits.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), params())
    assert extreme.tolist() == [0, 2]


def test_top_k_and_top_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None]
    noise = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.float64)
    for changes, expected in ((dict(top_k=2), [0.625, 0.375, 0, 0]), (dict(top_p=0.79), [0.625, 0.375, 0, 0]),
                              (dict(top_p=0.81), [0.5263, 0.3158, 0.1579, 0])):
        tokens, log_probs = draw(logits.expand(1000, -1), noise, params(**changes))
        assert torch.bincount(tokens, minlength=4).div(1000).tolist() == pytest.approx(expected, abs=2e-3)
        assert log_probs[0].exp().item() == pytest.approx(expected[0], abs=1e-4)


def test_stop_strings(tmp_path):
    rollout, _ = engine(tmp_path)
    free = rollout.generate(requests()[:1], params())[0]
    stop = rollout.tokenizer.decode(free.ids[1:3])
    got = rollout.generate(requests()[:1], params(stop=(stop,)))[0]
    text = rollout.tokenizer.decode(free.ids)
    shortest = next(n for n in range(1, 7) if stop in rollout.tokenizer.decode(free.ids[:n]))
    assert stop in text
    assert got.ids == free.ids[:shortest]
    assert got.finish_reason == "stop"


def test_tied_weights_are_one(tmp_path):
    """Cases 35 and 36: a tied parameter comes under one name or both."""
    rollout, model = engine(tmp_path, tie_word_embeddings=True)
    untied = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    rollout.load_weights(untied.items(), 9)
    assert rollout.policy_version == 9
