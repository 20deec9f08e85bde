"""Architectures from one rank's files over shards to files again: loading, weight stream and export."""

from __future__ import annotations

import torch

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
TIED = {"tie_word_embeddings": True}
KINDS = {
    "llama": ("llama", {}), "llama tied": ("llama", TIED), "qwen2": ("qwen2", TIED),
    "qwen3": ("qwen3", {}), "gemma": ("gemma", TIED), "qwen3_moe": ("qwen3_moe", MOE),
    "uneven": ("llama", {"intermediate_size": 45, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 30}),
}


def test_export(ranks2, tools, tmp_path):
    """Models on two ranks, of which the second reads no file: the weight stream has the names and content of
    save_pretrained's file, tied parameters stay one, and an export loads in transformers with equal logits."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from rlrun.testing.tiny import save_tiny

    ids = torch.arange(2, 12)
    expected = {}
    for name, (kind, sizes) in KINDS.items():
        model = save_tiny(tmp_path / name, kind, **{**SMALL, **sizes})
        with torch.no_grad():
            expected[name] = model.eval()(ids[None]).logits
    batch = tools.make_batch((9, 4, 7))

    def run():
        from unittest import mock

        import torch.distributed as dist

        import rlrun_fsdp.sharding as sharding

        results = {}
        for name in KINDS:
            config = tools.make_config(tmp_path / name, model__dtype="float32", actor__optim__lr=0.01)
            with mock.patch.object(sharding, "BUCKET_BYTES", 16_000):  # several buckets, and tensors larger than one
                worker = tools.make_worker(config)
                tools.save(worker, tmp_path / "out" / name, ["hf_model"])
                sent = tools.full_weights(worker)
                forward = worker.forward(batch, {"log_probs"}, 1.0)["log_probs"]
                worker.update(tools.my_shard(batch), tools.TokenLoss(), batch.denominators(), 1.0)
                results[name] = sent, forward, sum(p.to_local().numel() for p in worker.parameters), tools.full_weights(worker)
        return results if dist.get_rank() == 0 else {name: r[1:3] for name, r in results.items()}

    first, second = ranks2.run(run, timeout=120)
    for name in KINDS:
        saved, (sent, forward, held, after) = load_file(tmp_path / name / "model.safetensors"), first[name]
        assert sent.keys() == saved.keys(), name
        assert all(torch.equal(sent[key], x) for key, x in saved.items()), name
        total = sum(x.numel() for x in saved.values())
        assert held + second[name][1] == total, "no parameter is held twice, tied ones neither"
        assert torch.equal(forward, second[name][0])
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name / "hf").eval()
        with torch.no_grad():
            logits = exported(ids[None]).logits
            own = exported(batch.tokens["ids"][None, :9]).logits[0].log_softmax(-1)
        torch.testing.assert_close(logits, expected[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(forward[2:9], own[1:8].gather(1, batch.tokens["ids"][2:9, None])[:, 0], rtol=1e-5, atol=1e-5)
        unmoved = [key for key, x in saved.items() if torch.equal(after[key], x)]
        assert not [key for key in unmoved if "bias" not in key and "embed" not in key], name


def test_a_folder_without_weights_fails_on_all_ranks(gpt2, ranks2, tools, tmp_path):
    """What rank 0 cannot load is an error on every rank, and nobody waits."""
    import shutil

    import pytest

    shutil.copytree(gpt2, tmp_path / "broken")
    (tmp_path / "broken/config.json").unlink()

    def run():
        try:
            tools.make_worker(tools.make_config(tmp_path / "broken"))
        except ValueError as error:
            return str(error)

    for text in ranks2.run(run):
        assert "has no config.json" in text
    with pytest.raises(ValueError, match=r"has no Nothing; its decoder layers are GPT2Block"):
        ranks2.run(lambda: tools.make_worker(tools.make_config(gpt2, fsdp__wrap_policy__layer_classes=["Nothing"])))
