"""What the patch does to a model, to other models, and what it sends."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlrun.models.attention import NAME, Packed
from rlrun.testing.tiny import save_tiny, tiny_config
from rlrun_ulysses.heads import check_model, fits
from rlrun_ulysses.sequence_parallel import Ulysses, detach


def over_all_ranks():
    import torch.distributed as dist

    return Ulysses(dist.group.WORLD)


def mine(x):
    import torch.distributed as dist

    return x.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def test_one_model_at_a_time(gpt2, ranks1):
    """Only the patched model changes; a second patch and removal are as if there had been one and none."""
    def run():
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        gc.collect()  # models of other tests take their entries with them
        before = dict(ALL_ATTENTION_FUNCTIONS)
        patched, other = (AutoModelForCausalLM.from_pretrained(gpt2, attn_implementation=NAME).eval() for _ in range(2))
        ulysses = over_all_ranks()
        ulysses.attach(patched)
        ulysses.attach(patched)
        added = set(ALL_ATTENTION_FUNCTIONS) - set(before)
        assert added == {patched.config._attn_implementation}
        assert other.config._attn_implementation == NAME
        ids, packed = torch.arange(2, 12)[None], Packed.of(torch.tensor([0, 4, 10]))
        assert torch.equal(patched(ids, packed=packed).logits, other(ids, packed=packed).logits)
        detach(patched)
        detach(patched)
        assert patched.config._attn_implementation == NAME
        assert dict(ALL_ATTENTION_FUNCTIONS) == before
        ulysses.attach(patched)
        del patched
        gc.collect()
        assert dict(ALL_ATTENTION_FUNCTIONS) == before

    ranks1.run(run)


def test_not_listed_not_there(gpt2, ranks1, tools):
    """A run without the plugin leaves transformers as it was, in a process that has had one with it."""
    def run():
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from rlrun_ulysses.sequence_parallel import _MARK

        gc.collect()
        return [name for name in ALL_ATTENTION_FUNCTIONS if _MARK in name]

    config = tools.make_config(gpt2, 1)
    config.plugins.remove("ulysses")
    tools.update(ranks1, config, tools.make_batch(5, 3))
    assert ranks1.run(run) == [[]]


def test_language_layers_only():
    """The attention of a vision tower stays what it was."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {k: v for k, v in tiny_config("qwen2").to_dict().items() if k not in ("model_type", "transformers_version")}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 1}
    config = AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation={"text_config": NAME, "vision_config": "sdpa"})
    ulysses = Ulysses.__new__(Ulysses)
    ulysses.attach(model)
    assert model.config.text_config._attn_implementation != NAME
    assert model.config.vision_config._attn_implementation == "sdpa"
    detach(model)
    assert model.config.text_config._attn_implementation == NAME


def test_refusals(gpt2):
    """Attention that is not told of boundaries, and layers that read other tokens elsewhere, are named at start."""
    ulysses = Ulysses.__new__(Ulysses)
    with pytest.raises(ValueError, match="configured with 'sdpa'"):
        ulysses.attach(AutoModelForCausalLM.from_pretrained(gpt2, attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="linear_attention read other tokens"):
        check_model(tiny_config("qwen3_next", layer_types=["linear_attention", "full_attention", "full_attention"]), 2, "it")
    with pytest.raises(ValueError, match="rope_type dynamic"):
        check_model(tiny_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), 2, "it")


def test_head_counts():
    """Equal parts of query heads, and of key-value heads or their copies; else both numbers and what would work."""
    assert [n for n in range(1, 17) if fits(12, 6, n)] == [1, 2, 3, 6, 12]
    assert [n for n in range(1, 33) if fits(32, 8, n)] == [1, 2, 4, 8, 16, 32]
    message = r"size = 4 does not fit it with 12 query heads and 6 key-value heads: take 1, 2, 3, 6, 12"
    with pytest.raises(ValueError, match=message):
        check_model(tiny_config("llama", hidden_size=96, num_attention_heads=12, num_key_value_heads=6), 4, "it")
    with pytest.raises(ValueError, match="size = 3 does not fit it with 4 query heads and 4"):
        check_model(tiny_config("gpt2"), 3, "it")


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_what_is_sent(ranks2, tools, tmp_path, kv_heads):
    """Two all-to-alls a layer and direction, of (T/P) (2 Hq + 2 Hkv') D (P-1)/P elements a rank together; boundaries are made
    once a row."""
    save_tiny(tmp_path, "llama", num_key_value_heads=kv_heads, **tools.SIZES)

    def run():
        from unittest import mock

        import torch.distributed as dist

        from rlrun.batch import Batch
        from rlrun.models.loading import load_policy

        policy = load_policy(str(tmp_path), "lm", torch.float32)
        policy.sequence_parallel = over_all_ranks()
        policy.sequence_parallel.attach(policy.model)
        sizes, swap = [], dist.all_to_all_single

        def counted(received, sent, **options):
            sizes.append(sent.numel())
            return swap(received, sent, **options)

        batch = Batch(torch.tensor([0, 5, 8]), {"ids": torch.arange(2, 10)})
        with mock.patch.object(dist, "all_to_all_single", counted), mock.patch.object(Packed, "of", wraps=Packed.of) as made:
            row = policy.row(batch.tokens["ids"], batch.cu_seqlens, batch.position_ids, batch.position_ids > 0)
            outputs = policy(row, {"log_probs"})
            forward = sum(sizes)
            outputs["log_probs"].sum().backward()
        return len(sizes), forward, sum(sizes), made.call_count

    layers, ranks, heads, size, tokens = 2, 2, 4, 8, 8
    each = tokens / ranks * (2 * heads + 2 * max(kv_heads, ranks)) * size
    for calls, forward, total, made in ranks2.run(run):
        assert calls == 2 * 2 * layers
        assert forward == each * layers
        assert total == 2 * forward
        assert made == 1


def test_attention_sinks(ranks2):
    """Over two ranks attention has its own heads' sinks: outputs, and gradients added over ranks, are those of one rank."""
    def run():
        import torch.distributed as dist

        from rlrun.models.attention import packed_attention

        packed, module = Packed.of(torch.tensor([0, 5, 6])), torch.nn.Identity()
        generator = torch.Generator().manual_seed(0)
        q, k, v, weights = (torch.randn(1, n, 6, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2, 4))
        sinks = torch.randn(4, generator=generator, dtype=torch.float64)
        results = []
        for attention, part in ((packed_attention, lambda x: x), (over_all_ranks()._around(packed_attention), mine)):
            leaves = [part(x).clone().requires_grad_() for x in (q, k, v)] + [sinks.clone().requires_grad_()]
            output, _ = attention(module, *leaves[:3], None, s_aux=leaves[3], packed=packed, sliding_window=3)
            (output * part(weights).transpose(1, 2)).sum().backward()
            results.append([output.transpose(1, 2), *(x.grad for x in leaves)])
        (*whole, of_sinks), (*parts, added) = results
        dist.all_reduce(added)
        for got, expected in zip([*parts, added], [*map(mine, whole), of_sinks]):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)

    ranks2.run(run)


def test_positions_of_three_axes():
    """Rows are cut along their last dimension and filled up with zeros."""
    ulysses = Ulysses.__new__(Ulysses)
    ulysses.size, ulysses.rank = 4, 3
    positions = torch.arange(30).reshape(3, 10)
    assert ulysses.shard(positions).tolist() == [[9, 0, 0], [19, 0, 0], [29, 0, 0]]
    ulysses.rank = 1
    assert ulysses.shard(positions[0]).tolist() == [3, 4, 5]
    assert ulysses.shard(positions[0] > 3).tolist() == [False, True, True]
