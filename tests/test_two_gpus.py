"""Two GPUs over NCCL in bfloat16: sequences, weights or layers shared by two ranks give FSDP's numbers, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlrun.config.schema import Config, ModelConfig, OptimConfig
from rlrun.metrics import results
from rlrun.plugins import Plugins
from rlrun.testing.ranks import RankPool
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import TokenLoss, random_batch
from rlrun.workers.protocol import RoleRequest, RoleSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

TOLERANCE = 0.05
"""Of log-probabilities and entropies, absolute, and of a parameter's gradient, ||a - b|| / ||b||. bfloat16 rounds to 2^-8 of a
value, several times in each layer, and arrangements differ in what is added before it is rounded."""
LENGTHS = (40, 93, 17, 128, 64, 31)
ARRANGEMENTS = {
    "Ulysses 2": (["fsdp", "ulysses"], {"size": 2}),
    "Megatron TP2": (["megatron"], {"tensor_model_parallel_size": 2}),
    "Megatron TP2, sequence parallel": (["megatron"], {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "Megatron PP2": (["megatron"], {"pipeline_model_parallel_size": 2}),
}


def configured(plugins: Plugins, path: str, names: list[str], section: dict[str, Any]) -> Config:
    """Several uneven micro-batches, and a rate at which weights move far beyond what they were."""
    config = Config(plugins=names, model=ModelConfig(path=path))
    config.actor.backend, config.actor.tokens_per_micro_batch = names[0], 160
    config.actor.optim, config.resources.train_ranks = OptimConfig(name="sgd", lr=1e3, clip_grad=0.0), 2
    for info in plugins.infos:
        if info.name in names:
            setattr(config, info.name, info.config())
    vars(getattr(config, names[-1])).update(section)
    return config


def one_update(path: str, names: list[str], section: dict[str, Any]) -> dict[str, Any]:
    """On each of two ranks: columns before an update, its metrics, and how far weights move."""
    from rlrun.batch import shard

    rank, device = dist.get_rank(), torch.device("cpu")
    if torch.cuda.is_available():
        device, store = torch.device("cuda", rank), dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.PrefixStore("gpus", store), rank=rank, world_size=2)
    plugins = Plugins.load(names)
    config = configured(plugins, path, names, section)
    layout, request = plugins.layout(config), RoleRequest(True, path, "bfloat16", optim=config.actor.optim)
    want = frozenset({"log_probs", "entropy"})
    worker = plugins.make_worker(RoleSpec("actor", names[0], request, config, plugins, rank, device, 10, want), layout)
    whole = random_batch(LENGTHS)
    rows = shard(whole, layout.dp)
    batch = whole.select(rows[layout.dp_index[rank]])
    before = {name: x.float().cpu() for name, x in worker.weights()}
    columns = worker.forward(batch, want, 0.7)
    metrics = results(worker.update(batch, TokenLoss(), whole.denominators(), 0.7))
    moved = {name: (x.float().cpu() - before[name]) / 1e3 for name, x in worker.weights()}
    return {"columns": {rows[layout.dp_index[rank]][i]: {name: x[start:end] for name, x in columns.items()} for i, (start, end)
                        in enumerate(zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist()))},
            "metrics": metrics, "moved": moved}


def on_two_ranks(path: Any, names: list[str], section: dict[str, Any]) -> dict[str, Any]:
    pool = RankPool(2)
    try:
        first, second = pool.run(one_update, str(path), names, section)
    finally:
        pool.close()
    return first | {"columns": first["columns"] | second["columns"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen2", hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2)
    return path


@pytest.fixture(scope="module")
def expected(model):
    return on_two_ranks(model, ["fsdp"], {})


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_two_ranks_are_as_fsdp(model, expected, name):
    got = on_two_ranks(model, *ARRANGEMENTS[name])
    for number, columns in expected["columns"].items():
        for column, x in columns.items():
            torch.testing.assert_close(got["columns"][number][column], x, rtol=0, atol=TOLERANCE)
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=TOLERANCE, abs=TOLERANCE)
    assert got["moved"].keys() == expected["moved"].keys()
    total = sum(float(x.square().sum()) for x in expected["moved"].values()) ** 0.5
    assert total > 0
    for key, x in expected["moved"].items():
        # the bias of keys, of which attention is independent, has rounding errors for a gradient
        assert (got["moved"][key] - x).norm() <= TOLERANCE * max(float(x.norm()), 0.03 * total), key
