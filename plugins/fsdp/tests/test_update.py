"""Neither ranks nor micro-batches nor order change a gradient or a metric."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file


def one_update(tools, config, batch, loss, want=("log_probs", "entropy"), head="lm", atom="sequence"):
    worker = tools.make_worker(config, want, head=head)
    metrics = worker.update(tools.my_shard(batch, atom), loss, batch.denominators(), 0.7, atom)
    return metrics, tools.full_weights(worker)


def run(pool, tools, config, batch, loss, **kw):
    from rlrun.metrics import merge, results

    answers = pool.run(lambda: one_update(tools, config, batch, loss, **kw))
    return results(merge(m for m, _ in answers)), [w for _, w in answers]


def assert_same(got, expected, tolerance=1e-9):
    assert got[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert got[0][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    for weights in got[1]:
        for name, value in expected[1][0].items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", ["tokens", "sequences", "seq_mean", "constant", "groups"])
def test_ranks_and_micro_batches(gpt2, ranks1, ranks2, tools, kind):
    """Cases 63, 82, 98: 1 or 2 ranks, any micro-batch size, any order of rows: equal weights and metrics."""
    loss = tools.TermsLoss(kind)
    batch = tools.make_batch()
    scale = 0.02 if kind in ("constant", "sequences", "groups") else 1.0
    config = tools.make_config(gpt2, actor__optim__lr=scale)
    expected = run(ranks1, tools, config, batch, loss)
    before = load_file(gpt2 / "model.safetensors")
    moved = [(w - before[n]).norm() / before[n].norm() for n, w in expected[1][0].items() if before[n].norm() > 0]
    assert max(moved) > 0.01
    small = tools.make_config(gpt2, actor__optim__lr=scale, actor__tokens_per_micro_batch=16)
    shuffled = batch.select([3, 2, 5, 4, 1, 0])
    assert_same(run(ranks1, tools, small, shuffled, loss), expected)
    assert_same(run(ranks2, tools, config, batch, loss), expected)
    assert_same(run(ranks2, tools, small, shuffled, loss), expected)



OPTIONS = [
    {"fsdp__reshard_after_forward": False}, {"fsdp__wrap_policy__min_num_params": 10**9}, {"fsdp__shard_size": 1},
    {"fsdp__wrap_policy__layer_classes": ["GPT2MLP", "GPT2Attention"]},
    {"fsdp__cpu_offload": True}, {"model__gradient_checkpointing": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: next(iter(x)))
def test_options_change_no_number(gpt2, ranks1, ranks2, tools, options):
    """Each option of the backend gives the same update."""
    batch, loss = tools.make_batch(), tools.TermsLoss()
    expected = run(ranks1, tools, tools.make_config(gpt2), batch, loss)
    small = tools.make_config(gpt2, actor__tokens_per_micro_batch=12, **options)
    assert_same(run(ranks2, tools, small, batch, loss), expected)


def test_tied_llama(llama, ranks1, ranks2, tools):
    """Tied embeddings get both gradients at any number of ranks. (Norms compute in float32, hence the tolerance.)"""
    batch, loss = tools.make_batch(), tools.TermsLoss()
    expected = run(ranks1, tools, tools.make_config(llama), batch, loss)
    assert "lm_head.weight" not in expected[1][0]
    small = tools.make_config(llama, actor__tokens_per_micro_batch=16)
    assert_same(run(ranks2, tools, small, batch, loss), expected, tolerance=1e-6)


def test_value_model(gpt2, ranks1, ranks2, tools):
    """A critic: the scalar head learns too, equally at any number of ranks."""
    batch, loss = tools.make_batch(), tools.TermsLoss()
    expected = run(ranks1, tools, tools.make_config(gpt2), batch, loss, want=("values",), head="value")
    assert float(expected[1][0]["value_head.bias"].abs()) > 0.01
    small = tools.make_config(gpt2, actor__tokens_per_micro_batch=16)
    assert_same(run(ranks2, tools, small, batch, loss, want=("values",), head="value"), expected)


def test_ranks_without_work(gpt2, ranks1, ranks2, tools):
    """One sequence for two ranks, a sequence without loss tokens, no loss tokens at all: the other rank follows."""
    loss = tools.TermsLoss()
    for lengths in ((7,), (9, 2), (2, 2)):
        batch = tools.make_batch(lengths)
        expected = run(ranks1, tools, tools.make_config(gpt2), batch, loss)
        assert_same(run(ranks2, tools, tools.make_config(gpt2, actor__tokens_per_micro_batch=9), batch, loss), expected)
    assert expected[0]["grad_norm"] == 0.0
    assert "loss" not in expected[0], "a mean of nothing is no number"


def reference_gradient(path, batch, temperature=0.7, entropy_coef=0.1):
    """Token-mean gradient of TermsLoss("tokens") by transformers alone, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    total, entropies = 0.0, 0.0
    count = int(batch.tokens["loss_mask"].sum())
    for row in range(len(batch)):
        one = batch.select([row])
        mask = one.tokens["loss_mask"]
        log_probs = (model(one.tokens["ids"][None]).logits[0] / temperature).log_softmax(-1)[:-1]
        chosen = log_probs.gather(1, one.tokens["ids"][1:, None])[:, 0]
        ratio = (chosen - one.tokens["log_probs"][1:]).exp()
        total = total - (ratio * one.tokens["advantages"][1:])[mask[1:]].sum() / count
        entropies = entropies - ((log_probs.exp() * log_probs).sum(-1))[mask[1:]].sum() / count
    (total - entropy_coef * entropies).backward()
    return {"loss": total.item(), "entropy": entropies.item()}, dict(model.named_parameters())


def test_against_transformers_alone(gpt2, ranks2, tools):
    """Cases 63, 64, 101: ranks with 5 and 1 loss tokens; the gradient, its norm before clipping, and the clipped step
    are those of a plain token mean in one process."""
    batch = tools.make_batch((7, 3))
    metrics, params = reference_gradient(gpt2, batch)
    norm = float(torch.sqrt(sum((p.grad**2).sum() for p in params.values())))
    for clip in (0.0, norm / 2):
        config = tools.make_config(gpt2, actor__optim__clip_grad=clip)
        got, weights = run(ranks2, tools, config, batch, tools.TermsLoss())
        assert got["grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert got["loss"] == pytest.approx(metrics["loss"], rel=1e-9)
        assert got["entropy"] == pytest.approx(metrics["entropy"], rel=1e-9)
        for name, tensor in weights[0].items():
            expected = params[name] - params[name].grad * (0.5 if clip else 1.0)
            torch.testing.assert_close(tensor, expected.detach(), rtol=1e-9, atol=1e-9)


def test_loss_modes(gpt2, ranks1, ranks2, tools):
    """Case 82: token losses [[1,1,1,1],[5]] are 1.8, 3.0 and 4.5, whatever the micro-batches and ranks."""
    from rlrun.algorithms.losses import aggregate
    from rlrun.workers.protocol import Term

    batch = tools.make_batch((6, 3))
    batch.tokens["advantages"] = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 5], dtype=torch.float64)

    class Given:
        def __init__(self, mode):
            self.mode = mode

        def __call__(self, outputs, batch):
            mask = batch.tokens["loss_mask"]
            new = outputs["log_probs"][mask]
            losses = (new - new.detach()).exp() * batch.tokens["advantages"][mask]
            return {"loss": Term(*aggregate(losses, batch, self.mode), 1.0)}

    for mode, expected in (("token_mean", 1.8), ("seq_mean_token_mean", 3.0), ("seq_mean_token_sum", 4.5)):
        first = run(ranks1, tools, tools.make_config(gpt2, actor__optim__lr=0.1), batch, Given(mode))
        assert first[0]["loss"] == pytest.approx(expected, rel=1e-12)
        small = tools.make_config(gpt2, actor__optim__lr=0.1, actor__tokens_per_micro_batch=6)
        assert_same(run(ranks1, tools, small, batch, Given(mode)), first)
        assert_same(run(ranks2, tools, small, batch, Given(mode)), first)


def test_non_finite_gradient(gpt2, ranks2, tools):
    """Case 66: NaN on rank 1 in the second of three updates: both ranks skip it, weights, optimizer and schedule are as
    if it had never been."""
    batch = tools.make_batch()
    bad = tools.make_batch()
    config = tools.make_config(gpt2, actor__optim__name="adamw", actor__optim__lr=0.01, actor__optim__schedule="linear")

    def updates(poison):
        import torch.distributed as dist

        worker = tools.make_worker(config, total_updates=10)
        history = []
        for step in range(3):
            mine = tools.my_shard(bad if step == 1 else batch)
            if step == 1:
                if not poison:
                    continue
                if dist.get_rank() == 1:
                    mine.tokens["advantages"][:] = float("nan")
                before = tools.full_weights(worker)
            history.append(worker.update(mine, tools.TermsLoss(), batch.denominators(), 0.7))
            if step == 1:
                after = tools.full_weights(worker)
                assert all(torch.equal(before[name], after[name]) for name in before)
        return history, tools.full_weights(worker)

    poisoned, clean = ranks2.run(updates, True), ranks2.run(updates, False)
    for history, weights in poisoned:
        assert [h["skipped"].result for h in history] == [0.0, 1.0, 0.0]
        assert [h["lr"].result for h in history] == pytest.approx([0.009, 0.008, 0.008])
        assert all(torch.equal(weights[name], tensor) for name, tensor in clean[0][1].items())


def test_masked_slots_do_not_matter(gpt2, ranks1, tools):
    """Case 89: NaN, infinity and 1e6 in every masked slot of every column: bit-equal loss and gradient."""
    from rlrun.algorithms.losses import PolicyLoss

    loss = PolicyLoss(0.2, 0.2, "token_mean", kl_coef=0.1, entropy_coef=0.01)
    batch = tools.make_batch()
    names = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values", "returns", "token_rewards")

    def update(fill):
        worker = tools.make_worker(tools.make_config(gpt2))
        for name in names:
            column = batch.tokens["log_probs"].clone() if name not in batch.tokens else batch.tokens[name].clone()
            column[~batch.tokens["loss_mask"]] = fill
            batch.tokens[name] = column
        return worker.update(batch, loss, batch.denominators(), 0.7), tools.full_weights(worker)

    [(metrics, weights)] = ranks1.run(update, 0.0)
    for fill in (float("nan"), float("inf"), -float("inf"), 1e6):
        [(others, moved)] = ranks1.run(update, fill)
        assert others == metrics
        assert all(torch.equal(weights[name], moved[name]) for name in weights)


def test_first_token_in_the_mask_is_an_error(gpt2, ranks1, tools):
    """Nothing predicts the first token of a sequence."""
    batch = tools.make_batch(prompt=0)
    one = tools.make_config(gpt2)
    with pytest.raises(ValueError, match="first token"):
        ranks1.run(lambda: tools.make_worker(one).forward(batch, {"log_probs"}, 0.7))
