"""What forward returns, and that update computes the same."""

from __future__ import annotations

import torch


def test_ratio_is_one_on_the_first_update(llama, gpt2, ranks1, ranks2, tools):
    """Case 27: in float32 update's own log-probabilities are those that forward gave, whatever the micro-batches."""
    from rlrun.workers.protocol import Term

    batch = tools.make_batch((5, 9, 3, 12, 6, 9, 4, 4))

    def gap(outputs, micro):
        mask = micro.tokens["loss_mask"]
        distance = (outputs["log_probs"] - micro.tokens["log_probs"])[mask]
        return {"loss": Term(distance.exp().sum(), "tokens", 1.0), "gap": Term(distance.detach().abs().max(), "max")}

    def run(path, score_tokens, train_tokens):
        worker = tools.make_worker(tools.make_config(path, model__dtype="float32"), ("log_probs",))
        mine = tools.my_shard(batch)
        worker.spec.config.actor.tokens_per_micro_batch = score_tokens
        mine.tokens["log_probs"] = worker.forward(mine, {"log_probs"}, 0.7)["log_probs"]
        worker.spec.config.actor.tokens_per_micro_batch = train_tokens
        return worker.update(mine, gap, batch.denominators(), 0.7)["gap"].result

    for pool in (ranks1, ranks2):
        for path, score, train in ((llama, 4096, 12), (llama, 27, 14), (gpt2, 14, 27), (gpt2, 27, 4096)):
            assert max(pool.run(run, path, score, train)) < 1e-6


def test_reference_equals_actor_exactly(llama, ranks1, ranks2, tools):
    """Cases 44, 67: the actor keeps float32 parameters, the frozen reference bf16 ones, and the KL is exactly 0."""
    batch = tools.make_batch()

    def both():
        config = tools.make_config(llama, model__dtype="bfloat16")
        actor, ref = tools.make_worker(config), tools.make_worker(config, trainable=False)
        stored = {p.dtype for p in actor.model.parameters()}, {p.dtype for p in ref.model.parameters()}
        sent = {tensor.dtype for _, tensor in actor.weights()}
        return stored, sent, [w.forward(batch, {"log_probs"}, 0.7)["log_probs"] for w in (actor, ref)]

    for pool in (ranks1, ranks2):
        for stored, sent, (mine, theirs) in pool.run(both):
            assert stored == ({torch.float32}, {torch.bfloat16})
            assert sent == {torch.bfloat16}
            assert mine.dtype == torch.float32
            assert float(mine.abs().max()) > 1.0
            assert torch.equal(mine, theirs)


def test_forward_sees_new_weights(gpt2, ranks1, tools):
    """Parameters gathered by a forward are not those of the next one, after an update or a load."""
    batch = tools.make_batch()

    def run():
        worker = tools.make_worker(tools.make_config(gpt2, fsdp__reshard_after_forward=False))
        first = worker.forward(batch, {"log_probs"}, 0.7)["log_probs"]
        with torch.no_grad():
            for p in worker.model.parameters():
                p.mul_(1.5)
        second = worker.forward(batch, {"log_probs"}, 0.7)["log_probs"]
        worker.update(batch, tools.TokenLoss(), batch.denominators(), 0.7)
        return first, second, worker.forward(batch, {"log_probs"}, 0.7)["log_probs"]

    [(first, second, third)] = ranks1.run(run)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_compiled_layers(gpt2, ranks1, tools):
    """Compiled layers give the same numbers; lengths, micro-batches and passes that change compile nothing anew; sizes of the
    model are constants in them, not variables."""
    batches = [tools.make_batch(lengths) for lengths in (
        (5, 9, 3, 7, 6, 9), (4, 11, 2, 17), (3, 3, 40), (9,), (2, 9), (5, 6, 8), (31, 2), (8, 7, 6, 5, 4, 3, 2))]

    def run(compile):
        from functools import partial
        from unittest import mock

        from torch._dynamo.utils import counters

        sizes = []

        def backend(graph, inputs):
            sizes.extend(node.name for node in graph.graph.nodes if node.op == "placeholder" and node.name.startswith("l_self_")
                         and not isinstance(node.meta["example_value"], torch.Tensor))
            return graph.forward

        with mock.patch("torch.compile", partial(torch.compile, backend=backend)):
            worker = tools.make_worker(tools.make_config(gpt2, fsdp__compile=compile, actor__tokens_per_micro_batch=40))
            graphs, outputs = [], []
            for batch in batches:
                outputs.append(worker.forward(batch, {"log_probs"}, 0.7)["log_probs"])
                worker.update(tools.my_shard(batch), tools.TokenLoss(), batch.denominators(), 0.7)
                graphs.append(counters["stats"]["unique_graphs"])
        return graphs, sizes, outputs, tools.full_weights(worker)

    _, _, expected, weights = ranks1.run(run, False)[0]
    for graphs, sizes, outputs, moved in ranks1.run(run, True):
        assert graphs[0] > 0
        assert sizes == []
        assert graphs[4] == graphs[-1], "a row of one sequence may be a case of its own"
        for got, column in zip(outputs, expected):
            torch.testing.assert_close(got, column, rtol=1e-9, atol=1e-9)
        for name, tensor in weights.items():
            torch.testing.assert_close(moved[name], tensor, rtol=1e-9, atol=1e-9)
