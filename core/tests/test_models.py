"""PolicyModel and loading against transformers' own forward."""

from __future__ import annotations

import itertools
import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlrun.batch import Batch
from rlrun.models import folder, loading
from rlrun.testing.tiny import build_tokenizer, save_tiny

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
KINDS = [
    ("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {}), ("gpt2", {}),
    ("mistral", {"sliding_window": 4}), ("granite", {"logits_scaling": 3.0}), ("cohere", {}), ("phi", {}),
    ("gemma2", {"sliding_window": 4, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
]


def detached(tensors):
    return [x.detach() for x in tensors]


def packed_row(lengths=(5, 1, 9, 3, 3)):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, 258, (int(cu_seqlens[-1]),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, cu_seqlens, positions, positions > 0


@pytest.mark.parametrize("kind, extra", KINDS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_packed_equals_separate_forwards(tmp_path, kind, extra):
    """Case 28: each sequence of a packed row as if alone, whatever the architecture does to attention and logits
    (GPT-2's positions are absolute). The weights that go out are those that save_pretrained wrote, under its names."""
    save_tiny(tmp_path, kind, **(SIZES | extra))
    policy = loading.load_policy(str(tmp_path), "lm", torch.float32)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids, cu_seqlens, positions, mask = packed_row()
    with torch.no_grad():
        outputs = policy(policy.row(ids, cu_seqlens, positions, mask), {"log_probs", "entropy"}, 0.7)
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            expected = (alone(ids[None, start:end], use_cache=False).logits[0] / 0.7).log_softmax(-1)
            entropy = -(expected.exp() * expected).sum(-1)
            expected = expected[:-1].gather(1, ids[start + 1:end, None])[:, 0]
            torch.testing.assert_close(outputs["log_probs"][start + 1:end], expected, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(outputs["entropy"][start + 1:end], entropy[:-1], rtol=2e-5, atol=2e-5)
            assert outputs["log_probs"][start] == 0.0
    from safetensors.torch import load_file

    saved, sent = load_file(tmp_path / "model.safetensors"), dict(loading.saved_weights(policy, detached))
    assert saved.keys() == sent.keys()
    assert all(torch.equal(saved[name], sent[name]) for name in saved)
    assert loading.parameter_count(str(tmp_path)) == sum(x.numel() for x in alone.parameters())


def test_prompt_of_two_answer_of_three(tmp_path):
    """Case 88: exactly three log-probabilities and values, the first of answer[0]."""
    save_tiny(tmp_path, "gpt2", **SIZES)
    ids, mask = torch.tensor([7, 8, 9, 10, 11]), torch.tensor([False, False, True, True, True])
    row = ids, torch.tensor([0, 5]), torch.arange(5), mask
    policy = loading.load_policy(str(tmp_path), "lm", torch.float64)
    critic = loading.load_policy(str(tmp_path), "value", torch.float64)
    hidden = critic.model.base_model(input_ids=ids[None], position_ids=torch.arange(5)[None], use_cache=False,
                                     packed=loading_packed()).last_hidden_state[0]
    values = critic(critic.row(*row), {"values"})["values"]
    log_probs = policy(policy.row(*row), {"log_probs"})["log_probs"]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)(ids[None]).logits[0].log_softmax(-1)
    assert torch.equal(log_probs != 0, mask)
    assert torch.equal(values != 0, mask)
    assert log_probs[2].item() == pytest.approx(expected[1, 9].item(), rel=1e-10)
    assert values[2].item() == pytest.approx(critic.value_head(hidden[1]).item(), rel=1e-10)
    with pytest.raises(ValueError, match="values"):
        policy(policy.row(*row), {"values"})


def loading_packed():
    from rlrun.models.attention import Packed

    return Packed.of(torch.tensor([0, 5]))


def test_cache_is_refused(tmp_path):
    """A key-value cache has no place in packed attention."""
    save_tiny(tmp_path, **SIZES)
    policy = loading.load_policy(str(tmp_path), "lm", torch.float32)
    with pytest.raises(ValueError, match="packed="):
        policy.model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    with pytest.raises(ValueError, match="cache"):
        policy.model(torch.tensor([[1, 2, 3]]), packed=loading_packed())


@pytest.mark.parametrize("window", [2, 100])
def test_attention_sinks(tmp_path, window):
    """gpt-oss in packed rows has the log-probabilities and gradients, of sinks too, of transformers' own eager attention, one
    sequence at a time, with sliding windows that cut and that do not."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=258, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=window,
        initializer_range=0.3)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    policy = loading.load_policy(str(tmp_path), "lm", torch.float32)
    ids, cu_seqlens = torch.arange(2, 14), torch.tensor([0, 4, 5, 12])
    columns = []
    for part in ids.tensor_split(cu_seqlens[1:-1]):
        chosen = own(part[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, part[1:, None])[:, 0]
        columns.append(torch.cat([chosen.new_zeros(1), chosen]))
    expected = torch.cat(columns)
    batch = Batch(cu_seqlens, {"ids": ids})
    got = policy(policy.row(ids, cu_seqlens, batch.position_ids, batch.position_ids > 0), {"log_probs"})["log_probs"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, 12)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = dict(policy.model.named_parameters())
    sinks = [name for name in gradients if "sinks" in name]
    assert len(sinks) == 2
    assert all(float(gradients[name].grad.norm()) > 1e-3 for name in sinks)
    for name, p in own.named_parameters():
        assert (gradients[name].grad - p.grad).norm() <= 1e-4 * max(float(p.grad.norm()), 1e-3), name


def test_unknown_logit_transform_is_refused(tmp_path, monkeypatch):
    """A factor on the logits that is not accounted for is found at load."""
    save_tiny(tmp_path, "granite", **SIZES, logits_scaling=3.0)
    monkeypatch.setattr("rlrun.models.policy.logit_transform", lambda config: (1.0, None))
    with pytest.raises(ValueError, match="not supported"):
        loading.load_policy(str(tmp_path), "lm", torch.float32)


def test_dropout_is_set_to_zero(tmp_path, caplog):
    """Case 70: dropout in the config is switched off with one notice; the model is the same in training mode."""
    save_tiny(tmp_path, "llama", **SIZES, attention_dropout=0.1)
    with caplog.at_level(logging.WARNING, "rlrun"):
        policy = loading.load_policy(str(tmp_path), "lm", torch.float64)
    assert [r.message for r in caplog.records if "attention_dropout=0.1" in r.message]
    row = packed_row()
    modes = [model(model.row(*row), {"log_probs"})["log_probs"] for model in (policy.train(), policy.eval())]
    assert torch.equal(*modes)


def test_all_ids_that_end_a_sequence(tmp_path):
    """Case 25: generation config, model config and tokenizer may each name others."""
    save_tiny(tmp_path, **SIZES)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert folder.eos_ids(str(tmp_path), AutoTokenizer.from_pretrained(tmp_path)) == (7, 9, 1)


def test_export_and_load(tmp_path):
    """Cases 43, 44: the exported folder holds everything, and config.json names the weights' dtype."""
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny(source, "qwen2", chat_template="{{ messages[0].content }}", **SIZES)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6}))
    policy = loading.load_policy(str(source), "lm", torch.float32)
    loading.export(loading.saved_weights(policy, lambda xs: [x.detach().bfloat16() for x in xs]), out, str(source), str(source))
    again = AutoModelForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert again.generation_config.eos_token_id == [7, 9]
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages[0].content }}"
    for name, tensor in policy.model.named_parameters():
        assert torch.equal(again.get_parameter(name), tensor.bfloat16()), name


def test_value_model(tmp_path):
    """A fresh head depends on the seed alone; an exported value model loads with its head, values unchanged."""
    save_tiny(tmp_path / "lm", **SIZES)
    fresh = [loading.load_policy(str(tmp_path / "lm"), "value", torch.float32, seed) for seed in (1, 1, 2)]
    weights = [m.value_head.weight for m in fresh]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    loading.export(loading.saved_weights(fresh[0], detached), tmp_path / "out", *[str(tmp_path / "lm")] * 2)
    row = packed_row()
    again = loading.load_policy(str(tmp_path / "out"), "value", torch.float32, seed=3)
    values = [model(model.row(*row), {"values"})["values"] for model in (again, fresh[0])]
    assert torch.equal(*values)


def test_bad_folders(tmp_path):
    """No model, or weights that are missing: named, not filled with random numbers."""
    with pytest.raises(ValueError, match="config.json"):
        loading.load_policy(str(tmp_path), "lm", torch.float32)
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path, **SIZES)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lm_head"):
        loading.load_policy(str(tmp_path), "lm", torch.float32)
    assert build_tokenizer().eos_token_id == 1


@pytest.mark.parametrize("kind, keys", [("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}), ("falcon_h1", {})])
def test_models_whose_rows_leak_are_refused(kind, keys, tmp_path):
    """Case 28 and its kind: where a state or convolution runs along the row, packed sequences would see one another."""
    save_tiny(tmp_path, kind, **keys)
    with pytest.raises(ValueError, match="see one another"):
        loading.load_policy(str(tmp_path), "lm", torch.float32)
