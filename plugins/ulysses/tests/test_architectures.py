"""Architectures of transformers that the plugin knows nothing about: the table of the README."""

from __future__ import annotations

import pytest

LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
       "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 4}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 16, "factor": 2.0}
PLAIN = ("gpt2", "llama", "qwen2", "qwen3", "gemma", "phi", "olmo", "olmo2", "granite", "cohere", "starcoder2", "gpt_neox", "glm",
         "glm4", "smollm3", "helium", "ernie4_5", "seed_oss", "persimmon", "hunyuan_v1_dense", "arcee", "apertus")
WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3", "olmo3", "cohere2", "exaone4")
EQUAL: dict[str, dict] = {
    **{name: {} for name in PLAIN}, **dict.fromkeys(WINDOWED, WINDOW), "gemma2 capped": WINDOW | {"attn_logit_softcapping": 2.0},
    "qwen2_moe": MOE, "qwen3_moe": MOE, "mixtral": LOCAL, "granitemoe": LOCAL, "deepseek_v3": MLA,
    "gpt_oss": WINDOW | LOCAL | {"initializer_range": 0.3},
}
REFUSED = {  # by the plugin, or by packed attention before it
    "falcon_h1": ({}, "layers of kind hybrid read other tokens"),
    "minimax": (HYBRID | LOCAL, "layers of kind linear_attention read other tokens"),
    "qwen3_next": (HYBRID | MOE, "layers of kind linear_attention read other tokens"),
    "mamba2": ({"num_heads": 8, "head_dim": 16}, "layers of kind linear_attention read other tokens"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of kind conv read other tokens"),
    "llama longrope": ({"rope_parameters": LONGROPE}, "rope_type longrope depends on the longest position"),
    "bloom": ({}, "does not take its attention from transformers' attention interface"),
    "stablelm": ({}, "packed attention needs packed="), "nemotron": ({}, "packed attention needs packed="),
}


def test_table():
    """The README names each architecture that is compared or refused here, and each that reads images."""
    import re
    from pathlib import Path

    from rlrun.models.images import KINDS

    table = (Path(__file__).parents[1] / "README.md").read_text().partition("## Which models")[2]
    assert {name.split()[0] for name in (*EQUAL, *REFUSED, *KINDS)} <= set(re.findall(r"\w+", table))


def compare(name: str, changes: dict) -> None:
    """On each of two ranks: the model whole, then its part of sequences; outputs and gradients agree."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from rlrun.batch import Batch
    from rlrun.models.policy import PolicyModel, check_logits
    from rlrun.testing.tiny import tiny_config
    from rlrun_ulysses.heads import check_model
    from rlrun_ulysses.sequence_parallel import Ulysses

    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.tensor([0, 5, 14, 17, 24, 33]), {"ids": torch.randint(2, 258, (33,), generator=generator)})
    mask = batch.position_ids > 0
    results = []
    for size in (1, 2):
        torch.manual_seed(0)
        config = tiny_config(name.split()[0], **LAYERS, **changes)
        for key in [key for key, value in config.to_dict().items() if "drop" in key and isinstance(value, float)]:
            setattr(config, key, 0.0)
        policy = PolicyModel(AutoModelForCausalLM.from_config(config).eval(), "lm")
        check_logits(policy)
        if size == 2:
            check_model(policy.model.config, 2, name)
            policy.sequence_parallel = Ulysses(dist.group.WORLD)
            policy.sequence_parallel.attach(policy.model)
        row = policy.row(batch.tokens["ids"], batch.cu_seqlens, batch.position_ids, mask)
        outputs = policy(row, {"log_probs", "entropy"}, 0.7)
        weights = torch.linspace(-1, 1, 33)
        ((outputs["log_probs"] * weights).sum() - 0.1 * outputs["entropy"].sum()).backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in policy.named_parameters()}
        for gradient in gradients.values() if size == 2 else ():
            dist.all_reduce(gradient)
        results.append((outputs["log_probs"].detach(), gradients))
    (expected, whole), (got, parts) = results
    norm = float(torch.stack([g.norm() for g in whole.values()]).norm())
    worst = max(float((parts[n] - g).norm() / max(float(g.norm()), 1e-3 * norm)) for n, g in whole.items())
    assert norm > 0
    assert (got - expected).abs().max() < 2e-5, (name, (got - expected).abs().max())
    assert worst < 1e-4, (name, worst)


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_equal_without_a_line_for_it(ranks2, name):
    """One patch for all: log-probabilities, and gradients of them and entropies, over two ranks are those of one."""
    ranks2.run(compare, name, EQUAL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(ranks2, name):
    """What cannot be cut is refused by name on every rank, before anything is computed in parts."""
    changes, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"{reason}|see one another"):  # core refuses some before the plugin is asked
        ranks2.run(compare, name, changes)
