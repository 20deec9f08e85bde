"""Memory that is given up between phases: gone meanwhile, and no number changes."""

from __future__ import annotations

import pytest
import torch

PARAMS, GRADS, OPTIM = ({f"{name}_offload": True} for name in ("param", "grad", "optimizer"))
CASES = [
    (PARAMS | GRADS | OPTIM, "float32", True), (OPTIM, "bfloat16", True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (PARAMS, "float32", True), (GRADS, "float32", False), (PARAMS | GRADS | OPTIM, "bfloat16", False),
        (OPTIM, "float32", False))),
]


@pytest.mark.parametrize("flags, dtype, distributed", CASES, ids=str)
def test_offload(models, ranks2, tools, flags, dtype, distributed):
    """Two updates and a forward with everything that the configuration says off the device in between equal those without, bit
    for bit; what it does not say stays."""
    batch = tools.make_batch(5, 9, 3, 7)

    def held(tensors):
        from rlrun_megatron.offload import storages

        return sum(storage.nbytes() for storage in storages(tensors).values())

    def run(flags):
        from rlrun_megatron.optimizer import buffers, tensors

        config = tools.make_config(models["qwen2 tied"], use_distributed_optimizer=distributed, **flags)
        config.model.dtype, config.actor.optim.name, config.actor.optim.lr = dtype, "adamw", 0.01
        worker = tools.make_worker(config)
        numbers, sizes = [], []
        for _ in range(2):
            update = worker.update(batch, tools.TokenLoss(), batch.denominators(), 0.7)
            worker.offload()
            worker.offload()
            own = [p for stage in worker.stages for p in stage.parameters()]
            ids = {p.untyped_storage()._cdata for p in own}
            theirs = [x for x in tensors(worker.optimizer) if x.untyped_storage()._cdata not in ids]
            sizes.append([held(own), held(b.grad_data for b in buffers(worker.model)), held(theirs)])
            worker.onload(model=True, optimizer=False)
            columns = worker.forward(batch, {"log_probs"}, 0.7)
            worker.onload()
            numbers.append((update, columns["log_probs"]))
        return numbers, sizes, {name: x.clone() for name, x in worker.weights()}

    for (plain, there, expected), (got, away, weights) in zip(ranks2.run(run, {}), ranks2.run(run, flags)):
        assert [update for update, _ in got] == [update for update, _ in plain]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, plain))
        assert all(torch.equal(weights[name], x) for name, x in expected.items())
        assert all(min(sizes) > 0 for sizes in there)
        for sizes, whole in zip(away, there):
            off = [f"{name}_offload" in flags for name in ("param", "grad", "optimizer")]
            assert sizes == [0 if gone else size for gone, size in zip(off, whole)]
