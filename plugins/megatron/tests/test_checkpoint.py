"""Saving and resuming, in the same layout bit for bit and in others; folders that transformers reads."""

from __future__ import annotations

import pytest
import torch

from rlrun.testing.gloo import drive

CONTENTS = ["model", "optimizer", "extra"]


def train(tools, config, batch, steps, load=None, save=None, contents=CONTENTS):
    """A few updates, and what is there after them: learning rates, weights, random numbers."""
    def script(workers, plugins, config):
        from rlrun.metrics import results
        from rlrun.workers.protocol import RoleRequest

        want = frozenset({"log_probs", "entropy"})
        workers.build("actor", RoleRequest(True, config.model.path, config.model.dtype), 20, want)
        if load is not None:
            workers.load("actor", load, CONTENTS)
        history = [results(workers.update("actor", batch, tools.TokenLoss(), batch.denominators(), 0.7)) for _ in range(steps)]
        if save is not None:
            workers.save("actor", save, contents)
        return history, workers.call("weights", "actor")[0], torch.rand(3)

    return script


def adam(tools, path, **megatron):
    config = tools.make_config(path, micro=16, **megatron)
    config.actor.optim.name, config.actor.optim.lr, config.actor.optim.schedule = "adamw", 0.01, "linear"
    return config


TP2, PP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
RESUMED = [
    ("deep tied", PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen2 tied", {}),
        ("qwen2 tied", {"use_distributed_optimizer": False}), ("odd", TP2), ("moe", {"expert_model_parallel_size": 2}))),
]


@pytest.mark.parametrize("kind, layout", RESUMED, ids=str)
def test_resume(models, ranks2, tools, tmp_path, kind, layout):
    """Two updates, saved, and two more are, bit for bit, four updates in a row; also saved before the first."""
    batch = tools.make_batch(5, 9, 3, 7, 6, 9)
    config = adam(tools, models[kind], **layout)
    whole, weights, drawn = drive(ranks2, config, train(tools, config, batch, 4))
    for before in (2, 0):
        first, _, _ = drive(ranks2, config, train(tools, config, batch, before, save=tmp_path / str(before)))
        second, resumed, redrawn = drive(ranks2, config, train(tools, config, batch, 4 - before, load=tmp_path / str(before)))
        assert first + second == whole
        assert all(torch.equal(resumed[name], x) for name, x in weights.items())
        assert torch.equal(drawn, redrawn)
    assert whole[0]["lr"] != whole[3]["lr"]


@pytest.mark.parametrize("kind", ["odd tied", pytest.param("moe", marks=pytest.mark.slow)])
def test_another_layout(models, ranks1, ranks2, tools, tmp_path, kind):
    """What two tensor-parallel ranks saved goes on in one rank and in two stages: the next update is the same, of AdamW's
    moments too."""
    batch = tools.make_batch(5, 9, 3, 7, 6, 9)
    config = adam(tools, models[kind], **TP2)
    drive(ranks2, config, train(tools, config, batch, 2, save=tmp_path))
    [expected], weights, _ = drive(ranks2, config, train(tools, config, batch, 1, load=tmp_path))
    for pool, layout in ((ranks1, {}), (ranks2, PP2), (ranks2, {"use_distributed_optimizer": True})):
        config = adam(tools, models[kind], **layout)
        [got], moved, _ = drive(pool, config, train(tools, config, batch, 1, load=tmp_path))
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
        for name, x in weights.items():
            assert (moved[name] - x).norm() <= 1e-5 * x.norm(), name


@pytest.mark.parametrize("kind", ["odd tied", pytest.param("moe", marks=pytest.mark.slow)])
def test_initial_weights(models, ranks1, ranks2, tools, tmp_path, kind):
    """Weights of a checkpoint instead of those in the model's folder, which may lack them, in another layout: bit for bit. A
    critic takes all but its head. Names in the checkpoint are those of Megatron-LM's."""
    import shutil

    import torch.distributed.checkpoint as dcp

    batch, config = tools.make_batch(5, 9, 3), tools.make_config(models[kind], **TP2)
    _, sent, _ = drive(ranks2, config, train(tools, config, batch, 1, save=tmp_path / "saved"))
    names = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in names
    shutil.copytree(models[kind], tmp_path / "folder", ignore=shutil.ignore_patterns("*.safetensors"))

    def run(layout, head, path):
        config = tools.make_config(tmp_path / "folder", use_dist_checkpointing=True, dist_checkpointing_path=str(path), **layout)
        worker = tools.make_worker(config, True, head)
        update = worker.update(batch, tools.TokenLoss("tokens"), batch.denominators(), 0.7)
        return dict(tools.make_worker(config, False, head).weights()), update

    for pool, layout in ((ranks1, {}), (ranks2, PP2)):
        for taken, update in pool.run(run, layout, "lm", tmp_path / "saved"):
            assert all(torch.equal(taken[name], x) for name, x in sent.items())
    [expected], _, _ = drive(ranks2, config, train(tools, config, batch, 1, load=tmp_path / "saved"))
    assert update["grad_norm"].result == pytest.approx(expected["grad_norm"], rel=1e-5)
    for values, _ in ranks2.run(run, TP2, "value", tmp_path / "saved"):
        name = "layers.0.self_attn.q_proj.weight"
        assert torch.equal(values[name], sent[f"model.{name}"])
        assert 0 < float(values["value_head.weight"].norm()) < 1
    with pytest.raises(ValueError, match="has no checkpoint of format torch_dist"):
        ranks1.run(run, {}, "lm", tmp_path / "nowhere")
    shutil.copytree(models["llama"], tmp_path / "folder", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    with pytest.raises(ValueError, match="is not of this model"):
        ranks1.run(run, {}, "lm", tmp_path / "saved")


@pytest.mark.parametrize("contents, broken", [
    (["optimizer"], "rlrun_megatron.checkpoint._common"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (["model"], "os.fsync"), (["extra"], "torch.save"), (["hf_model"], "rlrun.workers.saving.export"))),
])
def test_a_full_disk_reaches_all_ranks(models, ranks2, tools, tmp_path, contents, broken):
    """A write error on the first rank raises OSError on both; nobody waits for anybody."""
    config = adam(tools, models["llama"])
    config.resources.train_ranks = 2

    def run():
        from contextlib import nullcontext
        from unittest import mock

        import torch.distributed as dist

        from rlrun.plugins import Plugins
        from rlrun.workers.protocol import RoleRequest, RoleSpec

        plugins, rank = Plugins.load(["megatron"]), dist.get_rank()
        spec = RoleSpec("actor", "megatron", RoleRequest(True, config.model.path, "float32"), config, plugins, rank,
                        torch.device("cpu"), 10)
        worker = plugins.make_worker(spec=spec, layout=plugins.layout(config))
        full = mock.patch(broken, side_effect=OSError(28, "No space left on device"))
        try:
            with full if rank == 0 else nullcontext():
                plugins.save_checkpoint(worker, tmp_path, contents)()
        except OSError as error:
            return str(error)
        return None

    for text in ranks2.run(run):
        assert "could not be written by rank 0" in text
        assert "No space left" in text
