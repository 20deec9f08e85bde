"""Checkpoints beyond the contract: parts of them, exports in other dtypes, adapters; write errors raise everywhere."""

from __future__ import annotations

import json

import pytest
import torch

CONTENTS = ["model", "optimizer", "extra"]


def adam(tools, path, **changes):
    return tools.make_config(path, actor__optim__name="adamw", actor__optim__lr=0.01, actor__optim__schedule="cosine",
                             actor__optim__warmup_steps=3, **changes)


def whole_state(worker):
    """Gathered parameters and optimizer moments."""
    state = {name: p.full_tensor().detach().clone() for name, p in worker.model.named_parameters()}
    for name, p in worker.model.named_parameters():
        for key, x in worker.optimizer.state[p].items():
            state[f"{name}.{key}"] = x.full_tensor().clone() if hasattr(x, "full_tensor") else x.clone()
    return state


def train(tools, config, batch, steps, load=None, save=None, contents=CONTENTS):
    worker = tools.make_worker(config, total_updates=10)
    plugins = worker.spec.plugins
    if load is not None:
        plugins.load_checkpoint(worker, load, contents)
    resumed = whole_state(worker)
    mine, counts = tools.my_shard(batch), batch.denominators()
    lrs = [worker.update(mine, tools.TokenLoss(), counts, 0.7)["lr"].result for _ in range(steps)]
    if save is not None:
        tools.save(worker, save, contents)
    return lrs, resumed, whole_state(worker)


def test_weights_only(gpt2, ranks1, tools, tmp_path):
    """Case 52: without optimizer and extra the schedule starts anew; a new rate in the configuration wins over a saved
    one."""
    batch, config = tools.make_batch(), adam(tools, gpt2)
    ranks1.run(train, tools, config, batch, 2, None, tmp_path)
    [(lrs, resumed, _)] = ranks1.run(train, tools, config, batch, 1, tmp_path, None, ["model"])
    assert lrs == pytest.approx([0.01 / 3])
    assert all(float(x.abs().max()) == 0 for name, x in resumed.items() if "exp_avg" in name)
    config.actor.optim.lr, config.actor.optim.betas = 0.03, [0.5, 0.9]
    [(lrs, _, _)] = ranks1.run(train, tools, config, batch, 1, tmp_path)
    assert lrs == pytest.approx([0.03])


def test_random_states(gpt2, ranks2, tools, tmp_path):
    """Case 53: each rank gets its own python, numpy and torch streams back."""
    config = tools.make_config(gpt2)

    def draws():
        import random

        import numpy as np

        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def save():
        import random

        import numpy as np
        import torch.distributed as dist

        worker = tools.make_worker(config)
        for seeder in (random.seed, np.random.seed, torch.manual_seed):
            seeder(100 + dist.get_rank())
        draws()
        tools.save(worker, tmp_path, ["extra"])
        return draws()

    def load():
        worker = tools.make_worker(config)
        worker.spec.plugins.load_checkpoint(worker, tmp_path, ["extra"])
        return draws()

    saved = ranks2.run(save)
    assert saved[0] != saved[1]
    assert ranks2.run(load) == saved


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export(llama, ranks2, tools, tmp_path, dtype):
    """Cases 43, 44: after an update on two ranks the export loads with transformers alone, in the dtype that its config
    names, and gives the trainer's log-probabilities."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    batch = tools.make_batch((9,))

    def run():
        worker = tools.make_worker(tools.make_config(llama, model__dtype=dtype))
        worker.update(tools.my_shard(batch), tools.TokenLoss(), batch.denominators(), 0.7)
        tools.save(worker, tmp_path, ["hf_model"])
        return worker.forward(batch, {"log_probs"}, 0.7)["log_probs"]

    mine = ranks2.run(run)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert str(model.dtype) == f"torch.{dtype}"
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == dtype
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 1
    with torch.no_grad():
        logits = model(batch.tokens["ids"][None]).logits[0].float() / 0.7
    expected = logits.log_softmax(-1)[:-1].gather(1, batch.tokens["ids"][1:, None])[:, 0]
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(mine[2:], expected[1:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("contents, broken", [
    (["model"], "os.fsync"), (["extra"], "torch.save"), (["hf_model"], "rlrun.workers.saving.export"),
])
def test_a_full_disk_reaches_all_ranks(gpt2, ranks2, tools, tmp_path, contents, broken):
    """A write error on rank 0 raises OSError on both ranks; nobody waits for anybody."""
    config = tools.make_config(gpt2)

    def run():
        from unittest import mock

        import torch.distributed as dist

        worker = tools.make_worker(config)
        full = mock.patch(broken, side_effect=OSError(28, "No space left on device"))
        try:
            if dist.get_rank() == 0:
                with full:
                    tools.save(worker, tmp_path, contents)
            else:
                tools.save(worker, tmp_path, contents)
        except Exception as error:  # noqa: BLE001 - what it is, is what is tested
            chain = [error]
            while chain[-1].__cause__ is not None:
                chain.append(chain[-1].__cause__)
            return [type(e).__name__ for e in chain], str(chain)
        return None

    for names, text in ranks2.run(run):
        assert "OSError" in names
        assert "No space left" in text


def test_only_a_disk_is_forgiven(gpt2, ranks2, tools, tmp_path):
    """Any other error while saving keeps its type: a run must not train on as if its disk were full."""
    config = tools.make_config(gpt2)

    def run():
        from unittest import mock

        import torch.distributed as dist

        worker = tools.make_worker(config)
        broken = mock.patch("rlrun_fsdp.checkpoint._extra", side_effect=KeyError("a bug on rank 0"))
        with broken if dist.get_rank() == 0 else mock.patch("os.devnull", "unused"):
            try:
                tools.save(worker, tmp_path, ["extra"])
            except Exception as error:  # noqa: BLE001 - what it is, is what is tested
                return type(error).__name__, str(error)
        return None

    assert ranks2.run(run) == [
        ("KeyError", "'a bug on rank 0'"), ("RuntimeError", "saving failed on rank 0: KeyError('a bug on rank 0')")]


def test_uneven_shards_are_exported(ranks2, tools, tmp_path):
    """Case 43 (the kind): a vocabulary that the ranks do not divide is gathered from a padded buffer, and exported whole."""
    from transformers import AutoModelForCausalLM

    from rlrun.testing.tiny import save_tiny

    model = save_tiny(tmp_path / "odd", words=["odd"], hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                      num_attention_heads=2)
    assert model.config.vocab_size % 2
    config = tools.make_config(tmp_path / "odd", model__dtype="float32")

    def run():
        worker = tools.make_worker(config)
        tools.save(worker, tmp_path, ["hf_model"])

    ranks2.run(run)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(exported[name], x) for name, x in model.state_dict().items())


def test_adapters_on_transposed_weights_are_refused(gpt2, ranks1, tools):
    """GPT-2 keeps its weights as [in, out]: merging adapters into them would be wrong, so they are refused by name."""
    config = tools.make_config(gpt2, model__dtype="float32", fsdp__lora__rank=2)
    with pytest.raises(ValueError, match=r"fsdp\.lora: GPT2LMHeadModel"):
        ranks1.run(tools.make_worker, config)


def test_adapters(llama, ranks1, ranks2, tools, tmp_path):
    """Low-rank adapters train alone, at any number of ranks alike; weights and export are merged; a checkpoint holds the
    adapters, and resumes; the reference is the actor with them switched off."""
    from safetensors.torch import load_file

    batch = tools.make_batch()
    config = tools.make_config(llama, model__dtype="float32", fsdp__lora__rank=2, fsdp__lora__alpha=16, actor__optim__lr=1.0)

    def update(load=None, save=None):
        worker = tools.make_worker(config)
        ref = tools.make_worker(config, trainable=False, role="ref")
        base = ref.forward(batch, {"log_probs"}, 0.7)["log_probs"]
        if load is not None:
            worker.spec.plugins.load_checkpoint(worker, load, CONTENTS)
        else:
            assert torch.equal(worker.forward(batch, {"log_probs"}, 0.7)["log_probs"], base), "adapters begin at nothing"
            for _ in range(2):
                worker.update(tools.my_shard(batch), tools.TokenLoss(), batch.denominators(), 0.7)
        if save is not None:
            tools.save(worker, save, [*CONTENTS, "hf_model"])
        after = worker.forward(batch, {"log_probs"}, 0.7)["log_probs"]
        assert torch.equal(ref.forward(batch, {"log_probs"}, 0.7)["log_probs"], base)
        assert ref.model is worker.model
        merged = tools.make_worker(tools.make_config(save / "hf", model__dtype="float32")) if save is not None else worker
        torch.testing.assert_close(merged.forward(batch, {"log_probs"}, 0.7)["log_probs"], after, rtol=1e-4, atol=1e-4)
        return after, tools.full_weights(worker), sum(p.numel() for p in worker.parameters)

    [(after, weights, trained)] = ranks1.run(update)
    before = load_file(llama / "model.safetensors")
    assert weights.keys() == before.keys()
    assert torch.equal(weights["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    moved = [float((weights[n] - x).norm() / x.norm()) for n, x in before.items() if "proj" in n]
    assert min(moved) > 1e-4
    assert trained < sum(x.numel() for x in before.values()) / 2
    for got, streamed, _ in ranks2.run(update, None, tmp_path / "two"):
        torch.testing.assert_close(got, after, rtol=1e-4, atol=1e-4)
        for name, x in weights.items():
            assert (streamed[name] - x).norm() <= 1e-5 * x.norm(), name
    [(resumed, _, _)] = ranks1.run(update, tmp_path / "two")
    torch.testing.assert_close(resumed, after, rtol=1e-4, atol=1e-4)


def test_an_extended_worker_keeps_the_shared_reference(llama, ranks1, tools):
    """`make` with a kind of one's own: the reference is the actor without adapters, no second model, and of that kind too."""
    config = tools.make_config(llama, model__dtype="float32", fsdp__lora__rank=2, actor__optim__lr=1.0)
    batch = tools.make_batch()

    def columns():
        from dataclasses import replace

        from rlrun_fsdp.worker import FsdpWorker, make

        class Doubled(FsdpWorker):
            def forward(self, batch, want, temperature):
                return {name: 2 * x for name, x in super().forward(batch, want, temperature).items()}

        spec = tools.make_worker(config).spec
        layout = spec.plugins.layout(config)
        plain = make(replace(spec, role="ref", request=replace(spec.request, trainable=False)), layout)
        base = plain.forward(batch, {"log_probs"}, 0.7)["log_probs"]
        actor = make(spec, layout, Doubled)
        ref = make(plain.spec, layout, Doubled)
        actor.update(batch, tools.TokenLoss(), batch.denominators(), 0.7)
        assert ref.model is actor.model
        assert isinstance(ref, Doubled)
        return base, *(worker.forward(batch, {"log_probs"}, 0.7)["log_probs"] for worker in (ref, actor))

    [(base, ref, actor)] = ranks1.run(columns)
    assert torch.equal(ref, 2 * base)
    assert not torch.allclose(actor, ref)
