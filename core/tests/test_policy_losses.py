"""Policy losses, aggregations and KL estimators: values and gradients against the papers' equations in float64."""

import itertools
import math
from functools import partial

import pytest
import torch

from rlrun.algorithms.losses import PolicyLoss, SftLoss, ValueLoss, aggregate, estimate_kl
from rlrun.batch import Batch

T64 = dict(dtype=torch.float64)
LOSSES = ("ppo_clip", "gspo", "cispo", "policy_gradient")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_constant")
ESTIMATORS = ("k2", "k3", "k3_unbiased")
LONGEST = 8


def ragged(lengths, prompt=1):
    rows = [{"ids": list(range(prompt + n)), "loss_mask": [False] * prompt + [True] * n} for n in lengths]
    return Batch.from_sequences(rows)


def drawn(fill=0.0, dtype=torch.float64):
    """A batch with a sequence without loss tokens and one with a tool's tokens, and outputs; `fill` stands outside the mask."""
    g = torch.Generator().manual_seed(1)
    batch = ragged([3, 0, 5, 1, 4], prompt=2)
    batch.tokens["loss_mask"][9] = False
    mask = batch.tokens["loss_mask"]

    def column(scale, shift):
        return torch.where(mask, (torch.randn(mask.shape, generator=g, **T64) * scale + shift).to(dtype), fill)

    old = column(0.5, -1.5)
    outputs = {"log_probs": old + column(0.3, 0.0), "entropy": column(0.5, 1.0), "values": column(1.0, 0.0)}
    batch.tokens |= {"log_probs": old, "ref_log_probs": column(0.5, -1.5), "advantages": column(1.0, 0.0),
                     "correction_weights": column(0.2, 1.0), "values": column(1.0, 0.0), "returns": column(1.0, 0.0),
                     "rollout_log_probs": column(0.5, -1.5), "gap_mask": mask}
    return batch, {name: output.detach().requires_grad_() for name, output in outputs.items()}


def total(terms, batch):
    counts = batch.denominators()
    return sum(term.coef * term.sum / counts[term.kind] for term in terms.values() if term.coef)


def reference(batch, outputs, loss, aggregation, low, high, dual=None, kl_coef=0.0, estimator="k2", entropy_coef=0.0):
    """The whole loss, one token after the other, with stop-gradients as the equations have them."""
    tokens, per_sequence, count = batch.tokens, [], 0
    for a, b in itertools.pairwise(batch.cu_seqlens.tolist()):
        own = [t for t in range(a, b) if tokens["loss_mask"][t]]
        if not own:
            continue
        new = [outputs["log_probs"][t] for t in own]
        old = [tokens["log_probs"][t] for t in own]
        sequence_ratio = torch.exp(sum(n - o for n, o in zip(new, old)) / len(own))
        losses = []
        for t, n, o in zip(own, new, old):
            advantage = tokens["advantages"][t] * tokens["correction_weights"][t]
            r = torch.exp(n - o)
            if loss == "gspo":  # GSPO-token: sg(s_i) pi / sg(pi)
                r = sequence_ratio.detach() * torch.exp(n - n.detach())
            if loss in ("ppo_clip", "gspo"):
                objective = torch.minimum(r * advantage, r.clamp(1 - low, 1 + high) * advantage)
                if dual is not None and advantage < 0:
                    objective = torch.maximum(objective, dual * advantage)
            elif loss == "cispo":
                objective = r.detach().clamp(1 - low, 1 + high) * advantage * n
            else:
                objective = advantage * n
            d = n - tokens["ref_log_probs"][t]
            distance = {"k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}.get(estimator)
            if distance is None:
                distance = torch.exp(n - o) * (torch.exp(-d) - 1 + d)
            losses.append(-objective + kl_coef * distance - entropy_coef * outputs["entropy"][t])
        per_sequence.append(losses)
        count += len(losses)
    if aggregation == "token_mean":
        return sum(map(sum, per_sequence)) / count
    over = {"seq_mean_token_mean": len, "seq_mean_token_sum": lambda _: 1, "seq_mean_constant": lambda _: LONGEST}[aggregation]
    return sum(sum(losses) / over(losses) for losses in per_sequence) / len(per_sequence)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_each_equals_its_equation(loss, aggregation):
    """Cases 82, 92, 96: value and gradient, with dual clip, KL, entropy bonus and importance weights; clipping does occur."""
    low, high = (0.01, 0.02) if loss == "gspo" else (0.1, 0.2)
    dual = 1.3 if loss in ("ppo_clip", "gspo") else None
    for estimator in ESTIMATORS:
        batch, outputs = drawn()
        policy = PolicyLoss(low, high, aggregation, 0.1, estimator, 0.05, loss, dual, LONGEST)
        terms = policy(outputs, batch)
        names = [outputs["log_probs"], outputs["entropy"]]
        got = total(terms, batch)
        expected = reference(batch, outputs, loss, aggregation, low, high, dual, 0.1, estimator, 0.05)
        assert got.item() == pytest.approx(expected.item(), rel=1e-9)
        for a, b in zip(torch.autograd.grad(got, names), torch.autograd.grad(expected, names), strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
        if loss != "policy_gradient":
            assert 0 < terms["actor/pg_clipfrac"].sum < 12


def test_gspo_is_the_papers_where_advantages_are_equal_in_a_sequence():
    """Case 96: exp(mean over valid tokens), clipped once a sequence; the gradient is that of the sequence's ratio itself."""
    batch, outputs = drawn()
    batch.tokens["advantages"] = torch.tensor([1.0, 9, -2, 0.5, 1.5], **T64)[batch.sequence_ids]
    del batch.tokens["correction_weights"]
    got = total(PolicyLoss(0.01, 0.4, "seq_mean_token_mean", loss="gspo")(outputs, batch), batch)
    diff, lengths = outputs["log_probs"] - batch.tokens["log_probs"], batch.loss_lengths()
    s = torch.exp(batch.sums(diff)[lengths > 0] / lengths[lengths > 0])
    advantage = torch.tensor([1.0, -2, 0.5, 1.5], **T64)
    expected = -torch.minimum(s * advantage, s.clamp(0.99, 1.4) * advantage).mean()
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    [a], [b] = (torch.autograd.grad(x, outputs["log_probs"]) for x in (got, expected))
    torch.testing.assert_close(a, b, atol=1e-14, rtol=1e-9)
    assert not a[~batch.tokens["loss_mask"]].any()


def test_clipping_numbers():
    """Case 92: eps .2, dual clip 3; and .2 below, .28 above: 1.27 is not clipped, 1.3 gives -1.28."""
    def at(ratio, advantage, high=0.2, dual=None):
        batch = ragged([1])
        batch.tokens |= {"advantages": torch.full((2,), advantage, **T64), "log_probs": torch.zeros(2, **T64)}
        new = torch.full((2,), math.log(ratio), **T64)
        terms = PolicyLoss(0.2, high, "token_mean", dual_clip=dual)({"log_probs": new}, batch)
        return terms["actor/pg_loss"].sum.item(), terms["actor/pg_clipfrac"].sum.item()

    ratios = (0.5, 1.0, 1.5, 5.0)
    assert [at(r, 1.0, dual=3.0)[0] for r in ratios] == pytest.approx([-0.5, -1, -1.2, -1.2])
    assert [at(r, -1.0, dual=3.0)[0] for r in ratios] == pytest.approx([0.8, 1, 1.5, 3.0])
    assert [at(r, -1.0)[0] for r in ratios] == pytest.approx([0.8, 1, 1.5, 5.0])
    assert at(1.27, 1.0, 0.28) == (pytest.approx(-1.27), 0)
    assert at(1.3, 1.0, 0.28) == (pytest.approx(-1.28), 1)


def test_aggregations():
    """Cases 82, 83: token losses [[1,1,1,1],[5]]: 1.8, 3.0, 4.5, and 4.5 over 8 however long they are. The gradient of two
    sequences together is the mean of both alone."""
    batch, losses = ragged([4, 1]), torch.tensor([1.0, 1, 1, 1, 5])
    counts = batch.denominators()
    for mode, expected in zip(AGGREGATIONS, (1.8, 3.0, 4.5, 4.5 / 8)):
        value, kind = aggregate(losses, batch, mode, LONGEST)
        assert float(value) / counts[kind] == pytest.approx(expected)

    def gradient(rows):
        batch, outputs = drawn()
        part = batch.select(rows)
        index = Batch(batch.cu_seqlens, {"at": torch.arange(batch.num_tokens)}).select(rows).tokens["at"]
        terms = PolicyLoss(0.2, 0.2, "seq_mean_constant", longest=LONGEST)({"log_probs": outputs["log_probs"][index]}, part)
        return torch.autograd.grad(total(terms, part), outputs["log_probs"])[0]

    torch.testing.assert_close(gradient([0, 2]), (gradient([0]) + gradient([2])) / 2, atol=1e-15, rtol=1e-12)


def test_on_policy_loss_is_zero_by_sequence_only():
    """Case 85: rewards [1, 0], lengths 1 and 3, ratio 1: 0 by sequence, +0.3536 by token."""
    from rlrun.algorithms.advantages import grpo, to_tokens

    for mode, expected in (("seq_mean_token_mean", 0.0), ("token_mean", 0.3536)):
        batch = ragged([1, 3])
        advantages = grpo(torch.tensor([1.0, 0], **T64), torch.tensor([0, 0]), eps=0.0)
        batch.tokens["advantages"] = to_tokens(advantages, batch)
        terms = PolicyLoss(0.2, 0.2, mode)({"log_probs": torch.full((6,), -1.0, **T64)}, batch)
        assert total(terms, batch).item() == pytest.approx(expected, abs=1e-4)


def test_kl_values_and_expected_gradients():
    """Case 90: values at d = .5 and -1; exact expected gradients on a 3-way softmax, and for k3_unbiased also where the samples
    are those of an older policy."""
    for d, values in {0.5: (0.5, 0.125, 0.10653), -1.0: (-1, 0.5, 0.71828)}.items():
        for kind, value in zip(("k1", "k2", "k3", "k3_unbiased"), (*values, values[2])):
            assert estimate_kl(torch.tensor(d), torch.tensor(0.0), kind).item() == pytest.approx(value, abs=1e-5)
    torch.manual_seed(0)
    logits, ref = torch.randn(3, **T64, requires_grad=True), torch.randn(3, **T64).log_softmax(0)
    p, older = logits.log_softmax(0), torch.randn(3, **T64).log_softmax(0)
    gradient = partial(torch.autograd.grad, inputs=logits, retain_graph=True)
    true = gradient((p.exp() * (p - ref)).sum())[0]
    forward = gradient((ref.exp() * (ref - p)).sum())[0]
    for kind, expected in (("k1", torch.zeros(3, **T64)), ("k2", true), ("k3", forward), ("k3_unbiased", true)):
        got = gradient((p.exp().detach() * estimate_kl(p, ref, kind)).sum())[0]
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    off_policy = (older.exp() * estimate_kl(p, ref, "k3_unbiased", older)).sum()
    assert off_policy.item() == pytest.approx((p.exp() * (p - ref)).sum().item(), rel=1e-12)
    torch.testing.assert_close(gradient(off_policy)[0], true, atol=1e-12, rtol=0)


def test_entropy_is_over_the_answer():
    """Case 101: three prompt and three answer tokens: mean(1.8, 1.5, 1.0) = 1.433, whatever the aggregation of the losses."""
    batch = ragged([3], prompt=3)
    entropy = torch.tensor([9.0, 9, 9, 1.8, 1.5, 1.0], **T64)
    batch.tokens["advantages"] = torch.zeros(6, **T64)
    for mode in AGGREGATIONS:
        loss = PolicyLoss(0.2, 0.2, mode, longest=LONGEST)
        value, kind, _ = loss({"log_probs": torch.zeros(6, **T64), "entropy": entropy}, batch)["actor/entropy"]
        assert value.item() / batch.denominators()[kind] == pytest.approx(1.43333, abs=1e-4)


EVERY = {f"{loss} {mode} {kind}": PolicyLoss(0.1, 0.2, mode, 0.1, kind, 0.01, loss, 3.0 if loss in LOSSES[:2] else None, LONGEST)
         for loss, mode, kind in [*((loss, "token_mean", kind) for loss in LOSSES for kind in ESTIMATORS),
                                  *(("ppo_clip", mode, "k2") for mode in AGGREGATIONS)]}
EVERY |= {"value": ValueLoss(0.2), **{f"sft {mode}": SftLoss(mode) for mode in AGGREGATIONS[:3]}}


def test_unselected_slots_change_nothing():
    """Case 89: NaN, inf and 1e6 in every slot outside the mask: every loss, aggregation and estimator keeps each bit of each
    term and gradient, in float32; gradients there are exactly 0."""
    def run(loss, fill):
        batch, outputs = drawn(fill, torch.float32)
        terms = loss(outputs, batch)
        total(terms, batch).backward()
        return [t.sum.detach() for t in terms.values()], [o.grad for o in outputs.values() if o.grad is not None]

    outside = ~drawn()[0].tokens["loss_mask"]
    for name, loss in EVERY.items():
        clean = run(loss, 0.0)
        assert not any(grad[outside].any() for grad in clean[1])
        for fill in (math.nan, math.inf, 1e6):
            for a, b in zip(itertools.chain(*clean), itertools.chain(*run(loss, fill)), strict=True):
                assert torch.equal(a, b), (name, fill)


def test_rounding_is_not_clipping():
    """Values that moved less than the clip count as not clipped, in float32 too."""
    generator = torch.Generator().manual_seed(0)
    old, step, returns = (torch.randn(1000, generator=generator) for _ in range(3))
    mask = torch.ones(1000, dtype=torch.bool)
    batch = Batch(torch.tensor([0, 1000]), {"loss_mask": mask, "values": old, "returns": returns})
    terms = ValueLoss(0.2)({"values": old + 0.01 * step.clamp(-5, 5)}, batch)
    assert float(terms["critic/vf_clipfrac"].sum) == 0
