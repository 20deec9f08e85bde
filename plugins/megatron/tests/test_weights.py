"""Folders to Megatron and back: names, shapes and every bit; what does not fit is refused."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

LAYOUTS = [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2},
           {"expert_model_parallel_size": 2}]


def make(tools, path, head="lm", **megatron):
    return tools.make_worker(tools.make_config(path, **megatron), False, head)


def test_round_trip(models, ranks2, tools):
    """Case 72: every family, tied and untied, with biases, grouped queries, experts and a vocabulary that ranks do not divide,
    in every layout: the stream is the file, on both ranks."""
    def run():
        from unittest import mock

        import rlrun_megatron.weights as weights

        found = {}
        with mock.patch.object(weights, "BUCKET_BYTES", 16_000):  # several buckets, and tensors larger than one
            for number, layout in enumerate(LAYOUTS):  # process groups are made once for each
                for kind, path in models.items():
                    if "expert_model_parallel_size" in layout and kind != "moe":
                        continue
                    stream = list(make(tools, path, **layout).weights())
                    assert len(stream) == len(dict(stream))
                    found[kind, number] = dict(stream)
        return found

    for found in ranks2.run(run):
        for (kind, layout), sent in found.items():
            saved = load_file(models[kind] / "model.safetensors")
            assert sent.keys() == saved.keys(), (kind, layout)
            assert all(torch.equal(sent[name], x) for name, x in saved.items()), (kind, layout)


def test_what_does_not_fit_is_refused(models, ranks1, tools, tmp_path):
    """A tensor too many, one too few, one of another shape: an error that names it."""
    import shutil

    saved = load_file(models["llama"] / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "no place for: ['model.layers.1.mlp.extra']": saved | {"model.layers.1.mlp.extra": torch.zeros(2)},
        f"weights missing: {name}": {k: v for k, v in saved.items() if k != name},
        f"{name} is of shape [2, 2]": saved | {name: torch.zeros(2, 2)},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        shutil.copytree(models["llama"], folder)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=re.escape(message)):
            ranks1.run(make, tools, folder)


def test_a_sharded_folder(models, ranks1, tools, tmp_path):
    """Weights in several files with an index."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(models["deep"]).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    [sent] = ranks1.run(lambda: dict(make(tools, tmp_path).weights()))
    assert all(torch.equal(sent[name], x) for name, x in load_file(models["deep"] / "model.safetensors").items())


def test_a_sequence_classifier(models, ranks2, tools, tmp_path):
    """A reward model's own head: scores as transformers computes them, its weights under its own names."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(models["qwen3"], num_labels=1, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    batch = tools.make_batch(5, 9)
    with torch.no_grad():
        hidden = [model.model(batch.select([row]).tokens["ids"][None]).last_hidden_state[0] for row in (0, 1)]
        expected = torch.cat([model.score(h)[:-1, 0] for h in hidden])

    def run(layout):
        worker = make(tools, tmp_path, "score", **layout)
        return worker.forward(batch, {"values"}, 1.0)["values"], dict(worker.weights())

    for layout in LAYOUTS[:2]:
        for values, sent in ranks2.run(run, layout):
            first = torch.ones(14, dtype=torch.bool)
            first[[0, 5]] = False
            torch.testing.assert_close(values[batch.tokens["loss_mask"]], expected[batch.tokens["loss_mask"][first]])
            assert all(torch.equal(sent[name], x) for name, x in load_file(tmp_path / "model.safetensors").items())
