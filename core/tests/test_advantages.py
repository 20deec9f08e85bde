"""Advantages against float64 references written from the papers' equations, and by counting sets."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from rlrun.algorithms import advantages
from rlrun.algorithms.policy_gradient import PolicyAlgorithm
from rlrun.algorithms.presets import GROUPED, PRESETS
from rlrun.batch import Batch
from rlrun.config.schema import AlgorithmConfig

T64 = dict(dtype=torch.float64)
SIZES = [4, 1, 6, 3]
"""Ragged groups, one of them of one sample."""
METHODS = sorted({str(preset["advantage"]) for preset in PRESETS.values()})


def algorithm(**options):
    return PolicyAlgorithm(SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=8)),
                           SimpleNamespace(algorithm=AlgorithmConfig(**options)))


def drawn(seed=0, fill=0.0, inner=True):
    """Interleaved ragged groups; sequences of 2 prompt tokens and up to 8 others, some of them (`inner`) not the policy's.

    One sequence has no token in the mask. `fill` is what stands where no mask selects.
    """
    g = torch.Generator().manual_seed(seed)
    groups = torch.tensor([i for i, n in enumerate(SIZES) for _ in range(n)])
    groups = groups[torch.randperm(len(groups), generator=g)]
    rows = []
    for s in range(len(groups)):
        n = 0 if s == 3 else 1 + int(torch.randint(0, 8, (1,), generator=g))
        own = [bool(torch.rand(1, generator=g) < 0.7) or not inner for _ in range(n)]
        rows.append({"ids": [0] * (2 + n), "loss_mask": [False, False, *own]})
    batch = Batch.from_sequences(rows)
    mask = batch.tokens["loss_mask"]
    for name in ("log_probs", "ref_log_probs", "values", "rollout_log_probs"):
        batch.tokens[name] = torch.where(mask, torch.randn(mask.shape, generator=g, **T64), fill)
    rewards, greedy = torch.randn(len(groups), generator=g, **T64), torch.randn(len(SIZES), generator=g, **T64)
    batch.sequences |= {"group": groups * 7 + 5, "reward": rewards, "baseline_reward": greedy[groups],
                        "finish_reason": ["stop"] * len(groups)}
    return batch


def reference(batch, name, coef, k=2, gamma=1.0, lam=0.95):
    """[T] by the papers' equations, token by token, for a KL (k1) of weight `coef` in the reward."""
    tokens, mask = batch.tokens, batch.tokens["loss_mask"].tolist()
    at = [[t for t in range(int(a), int(b)) if mask[t]] for a, b in itertools.pairwise(batch.cu_seqlens)]
    distance = [[float(tokens["log_probs"][t] - tokens["ref_log_probs"][t]) for t in row] for row in at]
    reward, group = batch.sequences["reward"].tolist(), batch.sequences["group"].tolist()
    totals = [r - coef * sum(d) for r, d in zip(reward, distance)]
    members = [[j for j in range(len(group)) if group[j] == g] for g in group]
    result = {}
    for s, row in enumerate(at):
        peers, length = [totals[j] for j in members[s]], len(members[s])
        mean = sum(peers) / length
        for i, t in enumerate(row):
            to_go = sum(gamma ** (j - i) * (-coef * distance[s][j] + (reward[s] if j == len(row) - 1 else 0))
                        for j in range(i, len(row)))
            if name == "gae":
                steps = [-coef * distance[s][j] + (reward[s] if j == len(row) - 1 else 0) for j in range(len(row))]
                v = [float(tokens["values"][u]) for u in row] + [0.0]
                result[t] = sum((gamma * lam) ** (j - i) * (steps[j] + gamma * v[j + 1] - v[j]) for j in range(i, len(row)))
            elif name == "reinforce_pp":
                result[t] = to_go
            elif name == "remax":
                result[t] = to_go - float(batch.sequences["baseline_reward"][s])
            elif length == 1:
                result[t] = 0.0
            elif name == "grpo":
                result[t] = (totals[s] - mean) / (math.sqrt(sum((p - mean) ** 2 for p in peers) / (length - 1)) + 1e-6)
            elif name == "reinforce_pp_baseline":
                result[t] = totals[s] - mean
            elif name == "rloo":
                result[t] = totals[s] - sum(totals[j] for j in members[s] if j != s) / (length - 1)
            elif name == "opo":
                result[t] = totals[s] - sum(len(at[j]) * totals[j] for j in members[s]) / sum(len(at[j]) for j in members[s])
            elif name == "pass_at_k":
                sets = list(itertools.combinations(members[s], min(k, length)))
                best = [max(totals[j] for j in one) for one in sets]
                with_s = [b for b, one in zip(best, sets) if s in one]
                average = sum(best) / len(best)
                std = math.sqrt(sum((b - average) ** 2 for b in best) / len(best))
                result[t] = (sum(with_s) / len(with_s) - average) / std if len(sets) > 1 else 0.0
    if name in ("gae", "reinforce_pp", "reinforce_pp_baseline"):  # normalised over the whole batch
        alone = {t for s, row in enumerate(at) if len(members[s]) == 1 for t in row} if name.endswith("baseline") else set()
        numbers = [v for t, v in result.items() if t not in alone]
        mean = sum(numbers) / len(numbers)
        std = math.sqrt(sum((v - mean) ** 2 for v in numbers) / (len(numbers) - 1))
        result = {t: 0.0 if t in alone else (v - mean) / std for t, v in result.items()}
    return torch.tensor([result.get(t, 0.0) for t in range(len(mask))], **T64)


@pytest.mark.parametrize("coef", [0.0, 0.3])
@pytest.mark.parametrize("name", METHODS)
def test_each_equals_its_equation(name, coef):
    """Cases 79, 86: ragged, interleaved groups, a group of one, tool tokens within and after a turn that end no episode, an empty
    completion; with and without a KL in the reward."""
    options = {"advantage": name, "kl_coef": coef, "kl_in": "reward", "kl_estimator": "k1", "pass_k": 2, "gamma": 0.9}
    batch = drawn()
    algorithm(**options).advantages(batch)
    expected = reference(batch, name, coef, gamma=1.0 if name == "remax" else 0.9)
    torch.testing.assert_close(batch.tokens["advantages"], expected, atol=1e-9, rtol=1e-9)
    assert expected.abs().max() > 0.5


@pytest.mark.parametrize("name", METHODS)
def test_unselected_slots_and_order_change_nothing(name):
    """Case 89: NaN, inf and 1e6 where no mask selects leave every bit; the order of samples changes no advantage."""
    options = {"advantage": name, "kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k3", "correction": "token_tis"}
    clean = drawn()
    algorithm(**options).advantages(clean)
    for fill in (math.nan, math.inf, 1e6):
        dirty = drawn(fill=fill)
        algorithm(**options).advantages(dirty)
        for column in ("advantages", "token_rewards", "correction_weights", *(["returns"] if name == "gae" else [])):
            assert torch.equal(dirty.tokens[column], clean.tokens[column]), (column, fill)
    order = torch.randperm(len(clean), generator=torch.Generator().manual_seed(1))
    mixed = drawn().select(order)
    algorithm(**options).advantages(mixed)
    torch.testing.assert_close(mixed.tokens["advantages"], clean.select(order).tokens["advantages"], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", GROUPED)
def test_flat_groups_and_groups_of_one(name):
    """Cases 79, 80: equal rewards of any size, and a group of one, give exactly 0, in float32 too; no number explodes."""
    rows = [{"ids": [0, 1, 2], "loss_mask": [False, True, True]} for _ in range(16)]
    for value in (0.35, 0.95, 1e6, 0.1):
        batch = Batch.from_sequences(rows)
        batch.sequences |= {"group": torch.tensor([1] * 7 + [2] + [3] * 8), "finish_reason": ["stop"] * 16,
                            "reward": torch.tensor([value] * 7 + [9.0] + [0.0] + [0.95] * 7)}
        algorithm(advantage=name, pass_k=3).advantages(batch)
        got = batch.tokens["advantages"].view(16, 3)
        assert not got[7].any()
        if name != "reinforce_pp_baseline":  # whose last step moves all by their common mean
            assert not got[:7].any()
        assert got.abs().max() <= 10


def test_normalised_leave_one_out_stays_small():
    """Case 80: [0, .95 x 7] and [1, 0, 0, 0], leave-one-out and then normalised: at most 10; rounding noise becomes 0."""
    r, g = torch.tensor([0.0, *[0.95] * 7, 1, 0, 0, 0]), torch.tensor([0] * 8 + [1] * 4)
    whitened = advantages.whiten(advantages.rloo(r, g), torch.ones(12, dtype=torch.bool))
    assert whitened.abs().max() <= 10
    noise = torch.full((1000,), 0.35) + torch.tensor([0.0, 3e-8]).repeat(500)
    assert noise.unique().numel() == 2
    assert not advantages.whiten(noise, torch.ones(1000, dtype=torch.bool)).any()


def test_pass_at_k_closed_form():
    """arXiv 2508.10751 for rewards of 0 and 1: n = 8, 2 right, k = 4; and where every set holds a right one, 0."""
    n, wrong, k = 8, 6, 4
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / std
    false = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    r, g = torch.tensor([0.0, 1, 0, 0, 1, 0, 0, 0], **T64), torch.zeros(8, dtype=torch.int64)
    expected = torch.tensor([false, right, false, false, right, false, false, false], **T64)
    torch.testing.assert_close(advantages.pass_at_k(r, g, k), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(advantages.pass_at_k(r, g, 1), (r - r.mean()) / r.std(correction=0), atol=1e-12, rtol=0)
    assert not advantages.pass_at_k(1 - r, g, k).any()
    assert not advantages.pass_at_k(r, g, 8).any()


def test_equal_lengths_make_opo_grpo_without_scale():
    """arXiv 2505.23585: the baseline is the length-weighted mean."""
    r, g = torch.tensor([1.0, 0, 0, 1], **T64), torch.tensor([0, 0, 1, 1])
    assert advantages.opo(r, g, torch.tensor([3, 1, 2, 2])).tolist() == [0.25, -0.75, -0.5, 0.5]
    assert torch.equal(advantages.opo(r, g, torch.full((4,), 5)), advantages.grpo(r, g, scale=False))
    assert advantages.opo(r, g, torch.zeros(4)).isfinite().all()


def test_tool_tokens_do_not_end_an_episode():
    """Case 86 over turns: two tokens, a tool's two, one token: the same advantages as without the tool between, gamma .5."""
    values, rewards = torch.tensor([0.5, -1.0, 2.0], **T64), torch.tensor([0.0, 0.0, 1.0], **T64)
    plain = Batch.from_sequences([{"ids": [0, 1, 2, 3], "loss_mask": [False, True, True, True]}])
    tool = Batch.from_sequences([{"ids": [0] * 6, "loss_mask": [False, True, True, False, False, True]}])
    got = []
    for batch in (plain, tool):
        mask = batch.tokens["loss_mask"]
        v, r = (torch.full(mask.shape, 9.0, **T64).masked_scatter(mask, x) for x in (values, rewards))
        adv, returns = advantages.gae(r, v, batch, 0.5, 0.95)
        got.append([adv[mask], returns[mask], advantages.returns_to_go(r, batch, 0.5)[mask]])
    assert torch.equal(torch.stack(got[0]), torch.stack(got[1]))
    assert got[1][2].tolist() == [0.25, 0.5, 1.0]
