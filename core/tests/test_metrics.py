import itertools
import math
import statistics as st

import numpy as np
import pytest
import torch

from rlrun.batch import Batch
from rlrun.metrics import (
    Value,
    data_metrics,
    merge,
    performance_metrics,
    results,
    timing_metrics,
    validation_metrics,
)


def batch(lengths=((2, 3), (1, 5), (3, 0)), **sequences):
    """Sequences of (prompt, completion) tokens; per-token columns count up, 1000 outside the mask."""
    rows, number = [], 0.0
    for prompt, completion in lengths:
        values = [number + i for i in range(completion)]
        number += completion
        column = [1000.0] * prompt + values
        rows.append({"ids": [5] * (prompt + completion), "loss_mask": [False] * prompt + [True] * completion,
                     "advantages": column, "returns": [2 * x for x in column], "values": column})
    return Batch.from_sequences(rows, {"prompt_length": torch.tensor([p for p, _ in lengths]), **sequences})


def test_means_weigh_as_they_should_and_extremes_compete():
    """Case 98: split over micro-batches or ranks in any way, a metric is the same number."""
    numbers = [0.5, -1.5, 4.0, 2.5, 0.0, 7.0]
    whole = {"m": Value(sum(numbers), 6), "hi": Value(7.0), "lo": Value(-1.5, None, "min"), "n": Value(6, None, "sum")}
    for cuts in ([1, 2, 3, 4, 5], [1], [5], [2, 4], []):
        pieces = np.split(np.array(numbers), cuts)
        parts = [{"m": Value(p.sum(), len(p)), "hi": Value(p.max()), "lo": Value(p.min(), None, "min"),
                  "n": Value(len(p), None, "sum")} for p in pieces]
        assert results(merge(parts)) == pytest.approx(results(whole), abs=1e-12)
        assert results(merge([merge(parts[:2]), merge(parts[2:])])) == pytest.approx(results(whole), abs=1e-12)
    with pytest.raises(ValueError, match="'m' is one thing"):
        merge([{"m": Value(1.0, 1)}, {"m": Value(1.0)}])
    with pytest.raises(ValueError, match="'m' is one thing"):
        merge([{"m": Value(1.0, None, "min")}, {"m": Value(1.0)}])


def test_nan_is_skipped_and_counted():
    """Case 100: [.5, nan, .8] -> .65, never NaN for all, and the reader sees how many were left out."""
    parts = [{"x": Value(v, 1), "top": Value(v)} for v in (0.5, math.nan, 0.8, math.inf)]
    assert results(merge(parts)) == pytest.approx({"x": 0.65, "nonfinite/x": 2, "top": 0.8, "nonfinite/top": 2})
    assert results(merge([merge(parts[:2]), merge(parts[2:])])) == results(merge(parts))
    assert results({"x": Value(math.nan, 1)}) == {"nonfinite/x": 1}
    assert results({"nothing": Value(0.0, 0)}) == {}


def test_only_loss_tokens_count():
    """Case 101: three prompt and three answer tokens."""
    b = Batch.from_sequences([{"ids": [1] * 6, "loss_mask": [False] * 3 + [True] * 3,
                               "advantages": [2.0, 2.2, 1.8 + 9, 1.8, 1.5, 1.0]}])
    metrics = results(data_metrics(b, 10, 10))
    assert metrics["critic/advantages/mean"] == pytest.approx(4.3 / 3)
    assert metrics["critic/advantages/max"] == pytest.approx(1.8)


def test_data_metrics_against_hand_numbers():
    b = batch(reward=torch.tensor([1.0, 0.25, 9.0]), correct=torch.tensor([1.0, 0.0, 0.0]),
              finish_reason=["stop", "length", "abort"])
    metrics = results(data_metrics(b, 5, 2))
    assert metrics == pytest.approx({
        "response/aborted_ratio": 1 / 3,
        "critic/score/mean": 0.625, "critic/score/max": 1.0, "critic/score/min": 0.25,
        "critic/rewards/mean": 0.625, "critic/rewards/max": 1.0, "critic/rewards/min": 0.25,
        "critic/correct/mean": 0.5, "critic/correct/max": 1.0, "critic/correct/min": 0.0,
        "critic/advantages/mean": 3.5, "critic/advantages/max": 7.0, "critic/advantages/min": 0.0,
        "critic/returns/mean": 7.0, "critic/returns/max": 14.0, "critic/returns/min": 0.0,
        "critic/values/mean": 3.5, "critic/values/max": 7.0, "critic/values/min": 0.0,
        "critic/vf_explained_var": 1 - 1 / 4,
        "response_length/mean": 8 / 3, "response_length/max": 5, "response_length/min": 0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 4, "response_length_non_aborted/max": 5,
        "response_length_non_aborted/min": 3, "response_length_non_aborted/clip_ratio": 0.5,
        "prompt_length/mean": 2, "prompt_length/max": 3, "prompt_length/min": 1, "prompt_length/clip_ratio": 2 / 3,
    })


def test_token_rewards_are_summed_inside_the_mask():
    b = batch(reward=torch.tensor([1.0, 0.25, 9.0]))
    b.tokens["token_rewards"] = b.tokens["advantages"]
    metrics = results(data_metrics(b, 5, 2))
    assert (metrics["critic/rewards/max"], metrics["critic/rewards/min"]) == (3 + 4 + 5 + 6 + 7, 0 + 1 + 2)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)


def test_all_aborted_is_no_failure():
    b = batch(((2, 0), (3, 0)), reward=torch.zeros(2), finish_reason=["abort", "abort"])
    metrics = results(data_metrics(b, 5, 9))
    assert metrics["response/aborted_ratio"] == 1
    assert metrics["response_length/max"] == 0
    assert not [name for name in metrics if name.startswith(("critic", "response_length_non_aborted"))]
    assert all(math.isfinite(v) for v in metrics.values())


def test_explained_variance_of_constant_returns_is_left_out():
    b = batch(((1, 2),))
    b.tokens["returns"] = torch.tensor([7.0, 1.0, 1.0])
    assert "critic/vf_explained_var" not in data_metrics(b, 5, 9)


def test_timing_and_throughput():
    b = batch()
    timings = {"gen": 0.8, "update_actor": 1.4, "testing": 3.0, "step": 7.0}
    per_token = {"timing_per_token_ms/gen": 100.0, "timing_per_token_ms/update_actor": 100.0}
    assert timing_metrics(timings, b) == pytest.approx({f"timing_s/{k}": v for k, v in timings.items()} | per_token)
    found = performance_metrics(b, timings, ranks=2)
    assert found.pop("perf/cpu_memory_used_gb") > 0
    assert found == pytest.approx({"perf/total_num_tokens": 14, "perf/time_per_step": 7.0, "perf/throughput": 1.0})


def brute(values, preds, k):
    """best, worst and maj over every set of k completions, by enumeration."""
    best, worst, maj = [], [], []
    means = {p: st.fmean(v for v, q in zip(values, preds) if q == p) for p in preds}
    for chosen in itertools.combinations(range(len(values)), k):
        best.append(max(values[i] for i in chosen))
        worst.append(min(values[i] for i in chosen))
        votes = [preds[i] for i in chosen]
        top = max(map(votes.count, votes))
        maj.append(st.fmean(means[p] for p in sorted(set(votes)) if votes.count(p) == top))
    return {f"{name}@{k}/{how}": f(x) for name, x in (("best", best), ("worst", worst), ("maj", maj))
            for how, f in (("mean", st.fmean), ("std", st.pstdev))}


@pytest.mark.parametrize("values, preds", [
    ([1, 0, 0, 1, 0, 0, 1], list("abcabba")),
    ([1, 0, 0, 0], list("abbb")),
    ([0.1, 0.7, 0.3, 0.7, 0.2, 0.9], list("aaabcd")),
    ([1.0, 1.0], list("aa")),
])
def test_best_worst_and_majority_are_exact(values, preds):
    n = len(values)
    scores = [{"acc": v, "pred": p} for v, p in zip(values, preds)]
    metrics = validation_metrics(["s"] * n, [0] * n, scores)
    for k in {2, 4, n}:
        if k <= n:
            for name, value in brute(values, preds, k).items():
                part = "val-core" if k == n and not name.startswith("worst") else "val-aux"
                assert metrics[f"{part}/s/acc/{name}"] == pytest.approx(value, abs=1e-7), name
    assert metrics[f"val-core/s/acc/mean@{n}"] == pytest.approx(st.fmean(values))
    assert metrics[f"val-aux/s/acc/std@{n}"] == pytest.approx(st.pstdev(values))


def test_validation_goes_by_source_and_question():
    sources = ["a"] * 4 + ["b"]
    metrics = validation_metrics(sources, [0, 1, 0, 1, 2], [
        {"reward": r, "acc": a} for r, a in [(1, 1), (0, 0), (0, 0), (0, 0), (None, math.nan)]
    ])
    assert metrics["val-core/a/acc/mean@2"] == 0.25
    assert metrics["val-core/a/acc/best@2/mean"] == 0.5
    assert metrics["val-aux/a/reward/mean@2"] == 0.25
    assert (metrics["val-aux/b/acc/nonfinite"], metrics["val-aux/b/reward/nonfinite"]) == (1, 1)
    assert not [name for name in metrics if "maj" in name or "/b/acc/mean" in name]
    without = validation_metrics(["a"], [0], [{"reward": 0.5, "part": 1.0}])
    assert without == {"val-core/a/reward/mean@1": 0.5, "val-aux/a/part/mean@1": 1.0}


def test_majority_of_many_samples_is_fast_and_sane():
    rng = np.random.default_rng(0)
    preds = rng.integers(0, 20, 64).tolist()
    scores = [{"acc": float(p == 3), "pred": str(p)} for p in preds]
    metrics = validation_metrics(["s"] * 64, [0] * 64, scores)
    draws = [rng.choice(preds, 8, replace=False).tolist() for _ in range(4000)]
    tops = [[p for p in set(d) if d.count(p) == max(map(d.count, d))] for d in draws]
    assert metrics["val-aux/s/acc/maj@8/mean"] == pytest.approx(st.fmean((3 in t) / len(t) for t in tops), abs=0.02)
