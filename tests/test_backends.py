"""FSDP and Megatron: the same numbers, and models that go from one to the other."""

from __future__ import annotations

import pytest
import torch

from rlrun.config.schema import ActorConfig, Config, ModelConfig, OptimConfig
from rlrun.metrics import results
from rlrun.plugins import Plugins
from rlrun.testing.contracts.base import configure
from rlrun.testing.gloo import drive
from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import TokenLoss, assert_same, random_batch, update
from rlrun.workers.protocol import RoleRequest

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CONTENTS = ["model", "optimizer", "extra"]


def make_config(path, backend="megatron", **megatron):
    """A config of tiny runs in float32: SGD at rate 1, so that weights move by the gradient."""
    optim = OptimConfig(name="sgd", lr=1.0, clip_grad=0.0)
    config = Config(model=ModelConfig(path=str(path), dtype="float32"),
                    actor=ActorConfig(backend=backend, optim=optim, tokens_per_micro_batch=16))
    return configure(config, Plugins.load([backend]), {backend: megatron})


def train(config, batch, steps, save=None, contents=CONTENTS):
    """A few updates, and the weights after them."""
    def script(workers, plugins, config):
        workers.build("actor", RoleRequest(True, config.model.path, "float32"), 20, frozenset({"log_probs", "entropy"}))
        for _ in range(steps):
            workers.update("actor", batch, TokenLoss(), batch.denominators(), 0.7)
        if save is not None:
            workers.save("actor", save, contents)
        return workers.call("weights", "actor")[0]

    return script


@pytest.mark.parametrize("head, optim", [("lm", {}), ("value", {}), ("lm", {"name": "adamw", "lr": 0.1, "eps": 0.1})])
def test_updates(ranks1, ranks2, tmp_path, head, optim):  # noqa: F811
    """Columns, metrics, gradients and AdamW's steps of Megatron, in tensor-parallel ranks, are FSDP's on one rank."""
    save_tiny(tmp_path, "llama", **SIZES)
    batch, configs = random_batch((5, 9, 3, 7, 6, 9, 2)), [make_config(tmp_path, "fsdp"), make_config(tmp_path, **TP2)]
    for config in configs:
        vars(config.actor.optim).update(optim)
    expected, got = (update(pool, config, batch, head) for pool, config in zip((ranks1, ranks2), configs))
    assert expected.metrics["grad_norm"] > 0.1
    assert_same(got, expected, 1e-4 if optim else 1e-5)


def test_between_backends(ranks1, ranks2, tmp_path):  # noqa: F811
    """Weights go from FSDP to Megatron and back by their exported folders, which transformers reads too: every bit."""
    from transformers import AutoModelForCausalLM

    batch, path = random_batch((5, 9, 3)), tmp_path / "model"
    save_tiny(path, "qwen2", tie_word_embeddings=True, **SIZES)
    there = make_config(path, "fsdp")
    sent = drive(ranks1, there, train(there, batch, 1, save=tmp_path / "fsdp", contents=["hf_model"]))
    here = make_config(tmp_path / "fsdp/hf", **TP2)
    taken = drive(ranks2, here, train(here, batch, 0))
    assert all(torch.equal(taken[name], x) for name, x in sent.items())
    moved = drive(ranks2, here, train(here, batch, 1, save=tmp_path / "megatron", contents=["hf_model"]))
    back = make_config(tmp_path / "megatron/hf", "fsdp")
    again = drive(ranks1, back, train(back, batch, 0))
    assert moved.keys() == again.keys() == sent.keys()
    assert all(torch.equal(again[name], x) for name, x in moved.items())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "megatron/hf").state_dict()
    assert all(torch.equal(exported[name], x) for name, x in moved.items())


@pytest.mark.slow
def test_contents(ranks2, tmp_path):  # noqa: F811
    """Without optimizer and extra the schedule starts anew and there is no momentum; a new rate in the configuration wins over a
    saved one: the same rates and losses as under FSDP."""
    save_tiny(tmp_path / "model", "qwen2", **SIZES)
    batch, found = random_batch((5, 9, 3, 7)), {}

    def script(workers, plugins, config, load, contents):
        workers.build("actor", RoleRequest(True, config.model.path, "float32"), 8, frozenset({"log_probs", "entropy"}))
        if load:
            workers.load("actor", load, contents)
        history = [results(workers.update("actor", batch, TokenLoss(), batch.denominators(), 0.7)) for _ in range(2)]
        if not load:
            workers.save("actor", tmp_path / config.actor.backend, CONTENTS)
        return [(one["lr"], one["loss"], one["grad_norm"]) for one in history]

    for backend in ("megatron", "fsdp"):
        config = make_config(tmp_path / "model", backend)
        vars(config.actor.optim).update(name="adamw", lr=0.01, eps=0.1, schedule="cosine", warmup_steps=3)
        found[backend] = [drive(ranks2, config, script, None, None)]
        config.actor.optim.lr = 0.02
        for contents in (["model"], ["model", "extra"], ["model", "optimizer"], CONTENTS):
            found[backend].append(drive(ranks2, config, script, tmp_path / backend, contents))
    rates = [[lr for lr, _, _ in history] for history in found["megatron"]]
    assert rates[0] == pytest.approx([0.01 / 3, 0.02 / 3])
    assert rates[1] == rates[3] == pytest.approx([0.02 / 3, 0.04 / 3])
    assert rates[2] == rates[4] != rates[1]
    for ours, theirs in zip(found["megatron"], found["fsdp"]):
        for a, b in zip(ours, theirs):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    losses = {round(history[1][1], 5) for history in found["fsdp"][1:]}
    assert len(losses) == 4, "each part of the state makes a difference"
