"""What an update does beside its gradient: optimizers, clipping, recomputation, steps that are skipped."""

from __future__ import annotations

import pytest
import torch

LENGTHS = (5, 9, 3, 7, 6, 9, 2)
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}


def adam(config, **optim):
    vars(config.actor.optim).update({"name": "adamw", "lr": 1e-3, "weight_decay": 0.5, "clip_grad": 0.1} | optim)
    return config


@pytest.mark.parametrize("layout", [
    {}, pytest.param(TP2 | {"use_distributed_optimizer": False}, marks=pytest.mark.slow)], ids=str)
def test_adamw(models, ranks1, ranks2, tools, layout):
    """Decay is for all parameters, norms and biases too; clipping is by the whole gradient: one step moves every weight alike."""
    expected = tools.update(ranks1, adam(tools.make_config(models["qwen2 tied"], "plain")), tools.make_batch(*LENGTHS))
    got = tools.update(ranks2, adam(tools.make_config(models["qwen2 tied"], micro=12, **layout)), tools.make_batch(*LENGTHS))
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
    assert expected.metrics["grad_norm"] > 0.1
    for name, x in expected.gradients.items():
        # a step is the sign of a gradient, nearly: where that is 0 but for rounding, it says nothing
        if not name.endswith("k_proj.bias"):
            assert (got.gradients[name] - x).norm() <= 1e-3 * x.norm(), name


SEVERAL = [
    {"name": "sgd", "lr": 0.5, "clip_grad": 0.5, "schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.2},
    pytest.param({"eps": 0.1, "lr": 0.1, "schedule": "wsd", "decay_fraction": 0.8, "warmup_steps": 1}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("optim", SEVERAL, ids=str)
def test_several_updates(models, ranks1, ranks2, tools, optim):
    """Warm-up, schedule, floor, clipping and decay over five updates: rates, norms, losses and weights. Epsilon is large, so
    that AdamW's steps do not depend on the sign of gradients that are 0 but for rounding."""
    batch, rates = tools.make_batch(*LENGTHS), set()
    for updates in (1, 2, 5):
        expected = tools.update(ranks1, adam(tools.make_config(models["qwen2 tied"], "plain"), **optim), batch, updates=updates)
        config = adam(tools.make_config(models["qwen2 tied"], micro=12, **TP2), **optim)
        tools.assert_same(tools.update(ranks2, config, batch, updates=updates), expected, 1e-4)
        rates.add(expected.metrics["lr"])
    assert len(rates) > 1


RECOMPUTED = [
    ("llama", TP2, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen2 tied", PP2, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}),
        ("llama", {"context_parallel_size": 2}, {"recompute_granularity": "selective"}),
        ("moe", {"expert_model_parallel_size": 2}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}))),
]


@pytest.mark.parametrize("kind, layout, override", RECOMPUTED, ids=str)
def test_recomputed_parts(models, ranks1, ranks2, tools, kind, layout, override):
    """Megatron's own choices of what to compute again change no number, and are in force."""
    from unittest import mock

    import megatron.core.tensor_parallel.random as rng

    expected = tools.update(ranks1, tools.make_config(models[kind], "plain"), tools.make_batch(*LENGTHS))
    config = tools.make_config(models[kind], micro=12, override_transformer_config=override, **layout)
    tools.assert_same(tools.update(ranks2, config, tools.make_batch(*LENGTHS)), expected)

    def again():
        worker = tools.make_worker(config)
        with mock.patch.object(rng.CheckpointFunction, "backward", side_effect=InterruptedError):
            try:
                worker.update(tools.make_batch(9), tools.TokenLoss(), {"tokens": 7.0}, 0.7)
            except InterruptedError:
                return True
        return False

    if "pipeline_model_parallel_size" not in layout:  # whose other ranks would wait
        assert ranks2.run(again) == [True, True]


@pytest.mark.parametrize("override", [
    {"overlap_grad_reduce": True, "bucket_size": 1000},
    pytest.param({"average_in_collective": False, "check_for_nan_in_grad": True}, marks=pytest.mark.slow)], ids=str)
def test_override_ddp_config(models, ranks1, ranks2, tools, override):
    """Gradients that are added over ranks bucket by bucket, during the backward pass, are the same."""
    expected = tools.update(ranks1, tools.make_config(models["qwen2 tied"], "plain"), tools.make_batch(*LENGTHS))
    config = adam(tools.make_config(models["qwen2 tied"], micro=12, override_ddp_config=override), lr=1e-3)
    assert tools.update(ranks2, config, tools.make_batch(*LENGTHS)).metrics["grad_norm"] == pytest.approx(
        expected.metrics["grad_norm"], rel=1e-5)
    config = tools.make_config(models["qwen2 tied"], micro=12, override_ddp_config=override)
    tools.assert_same(tools.update(ranks2, config, tools.make_batch(*LENGTHS)), expected)


@pytest.mark.parametrize("layout", [TP2, pytest.param(PP2, marks=pytest.mark.slow)], ids=str)
def test_recomputation(models, ranks1, ranks2, tools, layout):
    """Layers that are computed again in the backward pass change no number."""
    expected = tools.update(ranks1, tools.make_config(models["llama"], "plain"), tools.make_batch(*LENGTHS))
    config = tools.make_config(models["llama"], micro=12, **layout)
    config.model.gradient_checkpointing = True
    tools.assert_same(tools.update(ranks2, config, tools.make_batch(*LENGTHS)), expected)


def test_dropout_is_off(ranks2, tools, tmp_path):
    """Case 70: a model whose configuration has dropout computes the same in training as before it, to the last bit."""
    from rlrun.testing.tiny import save_tiny

    save_tiny(tmp_path, "qwen3", attention_dropout=0.5, **tools.SIZES)
    got = tools.update(ranks2, tools.make_config(tmp_path, micro=12, **PP2), tools.make_batch(*LENGTHS))
    assert all(torch.equal(got.kept[name], x) for name, x in got.columns.items())


def test_ranks_without_work(models, ranks1, ranks2, tools):
    """One sequence for two ranks, a sequence without loss tokens, no loss tokens at all: the other rank follows."""
    for lengths in ((7,), (9, 2), (2, 2)):
        batch = tools.make_batch(*lengths)
        expected = tools.update(ranks1, tools.make_config(models["moe"], "plain"), batch)
        got = tools.update(ranks2, tools.make_config(models["moe"], micro=9, expert_model_parallel_size=2), batch)
        tools.assert_same(got, expected)
    assert expected.metrics["grad_norm"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, TP2], ids=str)
def test_non_finite_gradient(models, ranks2, tools, layout):
    """Case 66: NaN in the second of three updates: all ranks skip it, and weights, optimizer and schedule are as if it had never
    been."""
    from rlrun.testing.gloo import drive

    config = adam(tools.make_config(models["llama"], micro=12, **layout), schedule="linear", lr=0.01)
    batch, bad = tools.make_batch(*LENGTHS), tools.make_batch(*LENGTHS)
    bad.tokens["advantages"][bad.cu_seqlens[1] - 1] = float("nan")

    def script(workers, plugins, config, poison):
        from rlrun.workers.protocol import RoleRequest

        workers.build("actor", RoleRequest(True, config.model.path, "float32"), 10, frozenset({"log_probs", "entropy"}))
        updates = [batch, bad, batch] if poison else [batch, batch]
        history = [workers.update("actor", one, tools.TokenLoss(), one.denominators(), 0.7) for one in updates]
        return history, workers.call("weights", "actor")

    history, weights = drive(ranks2, config, script, True)
    clean, expected = drive(ranks2, config, script, False)
    assert [h["skipped"].result for h in history] == [0.0, 1.0, 0.0]
    assert [h["lr"].result for h in history] == pytest.approx([0.009, 0.008, 0.008])
    assert history[2] == clean[1]
    assert "nonfinite/loss" in history[1]
    for rank in (0, 1):
        assert all(torch.equal(weights[rank][name], x) for name, x in expected[rank].items())


@pytest.mark.slow
def test_bfloat16(models, ranks1, ranks2, tools):
    """Weights in half precision, of which the optimizer has a float32 copy: near float32."""
    expected = tools.update(ranks1, adam(tools.make_config(models["llama"], "plain")), tools.make_batch(*LENGTHS))
    for layout in (TP2, {"use_distributed_optimizer": False}):
        config = adam(tools.make_config(models["llama"], **layout))
        config.model.dtype = "bfloat16"
        got = tools.update(ranks2, config, tools.make_batch(*LENGTHS))
        torch.testing.assert_close(got.columns["log_probs"], expected.columns["log_probs"], rtol=0.02, atol=0.02)
        assert got.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=0.05)
        for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
            x = expected.gradients[name]
            assert (got.gradients[name] - x).norm() <= 0.2 * x.norm(), name


def test_vocabulary_parallel_log_probs(ranks2):
    """Log-probabilities, entropies and gradients over a cut vocabulary, in float64, are those of the whole one."""
    def run():
        import torch.distributed as dist

        from rlrun.models.log_probs import chosen_log_probs

        torch.manual_seed(0)
        hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
        targets, bounds = torch.tensor([0, 5, 6, 10, 3, 9, 2]), [(0, 6), (6, 11)][dist.get_rank()]

        def gradients(weight, **shard):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            log_probs, entropy = chosen_log_probs(h, w, None, targets, 0.7, entropy=True, chunk=3, **shard)
            (log_probs * torch.arange(7) + entropy.square()).sum().backward()
            return log_probs.detach(), entropy.detach(), h.grad, w.grad

        whole = gradients(weight)
        part = gradients(weight[slice(*bounds)], group=dist.group.WORLD, first=bounds[0])
        dist.all_reduce(part[2])
        return [(a, b) for a, b in zip(part, (*whole[:3], whole[3][slice(*bounds)]))]

    for pairs in ranks2.run(run):
        for got, expected in pairs:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_images_are_refused(models, ranks1, tools):
    """A batch with images is not trained on as if it had none."""
    batch = tools.make_batch(5, 9)
    batch.ragged |= {"pixel_values": [None, None], "image_grid_thw": [None, None]}
    with pytest.raises(ValueError, match="which the megatron backend does not read"):
        tools.update(ranks1, tools.make_config(models["llama"]), batch)
