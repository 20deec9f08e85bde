"""Metrics under the names that users know. They travel as what they are and become numbers once, on the driver."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rlrun.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from rlrun.batch import Batch


@dataclass(frozen=True, slots=True)
class Value:
    """A metric on its way: a sum with what it is divided by; or, without a count, a maximum, minimum or plain sum."""

    total: float
    count: float | None = None
    kind: Literal["max", "min", "sum"] = "max"

    @property
    def result(self) -> float:
        """The number; NaN for a mean of nothing."""
        if self.count is None:
            return self.total
        return self.total / self.count if self.count else math.nan


def merge(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Metrics of several ranks or updates as one: sums and counts add, extremes compete.

    What is not finite is left out, and counted as `nonfinite/NAME`: one NaN must not hide all else."""
    merged: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            if not math.isfinite(value.total):
                name, value = f"nonfinite/{name}", Value(1.0, None, "sum")
            old = merged.get(name)
            merged[name] = value if old is None else _both(name, old, value)
    return merged


def _both(name: str, a: Value, b: Value) -> Value:
    if (a.count is None) != (b.count is None) or (a.count is None and a.kind != b.kind):
        raise ValueError(f"metric {name!r} is one thing in one place and another in another: {a} and {b}")
    if a.count is None or b.count is None:
        combine: Any = {"max": max, "min": min, "sum": sum}[a.kind]
        return Value(combine((a.total, b.total)), None, a.kind)
    return Value(a.total + b.total, a.count + b.count)


def results(merged: Mapping[str, Value]) -> dict[str, float]:
    """The numbers; means of nothing are left out."""
    return {name: float(value.result) for name, value in merge([merged]).items() if value.count != 0}


def of_role(role: str, update: Mapping[str, Value]) -> dict[str, Value]:
    """What an update says of itself, under its role's name, as means over a step's updates."""
    own = ("grad_norm", "lr", "skipped")
    names = {k: f"{role}/{k}" for k in own} | {f"nonfinite/{k}": f"nonfinite/{role}/{k}" for k in own}
    return {names.get(k, k): Value(v.total, 1.0) if k in own else v for k, v in update.items()}


def statistics(name: str, values: Tensor) -> dict[str, Value]:
    """`name`/mean, /max and /min of a tensor of numbers; nothing of an empty one."""
    if not values.numel():
        return {}
    values = values.detach().double()
    return {f"{name}/mean": Value(float(values.sum()), values.numel()), f"{name}/max": Value(float(values.max())),
            f"{name}/min": Value(float(values.min()), None, "min")}


def check_gap(metrics: Mapping[str, float], limit: float | None) -> None:
    """Raises RunError where the engine's and the trainer's log-probabilities are further apart than `limit`."""
    gap = metrics.get("rollout/gap_mean", 0.0)
    if limit is not None and gap > limit:
        raise RunError(f"rollout/gap_mean is {gap:.3g}, above rollout.gap_limit: engine and trainer are not the same policy")


def data_metrics(batch: Batch, max_new_tokens: int, max_prompt_tokens: int) -> dict[str, Value]:
    """What a step's samples were: rewards, advantages, lengths. Per-token columns count only inside `loss_mask`.

    Samples that the engine gave up (aborted, or without a token) count in no reward. A completion that hit
    `max_new_tokens` counts in response_length/clip_ratio by its finish reason, or, where there is none, by its length."""
    import torch

    tokens, sequences = batch.tokens, batch.sequences
    mask = tokens["loss_mask"]
    whole = replace(batch, tokens={**tokens, "loss_mask": tokens.get("response_mask", mask)})  # also what no loss saw
    lengths = whole.loss_lengths()
    reasons = sequences.get("finish_reason") or ["length" if n >= max_new_tokens else "stop" for n in lengths.tolist()]
    clipped = torch.tensor([reason == "length" for reason in reasons])
    aborted = torch.tensor([reason == "abort" for reason in reasons]) | (lengths == 0)
    metrics: dict[str, Value] = {"response/aborted_ratio": _share(aborted)}
    for column, name in (("reward", "score"), ("correct", "correct")):
        if column in sequences:
            metrics |= statistics(f"critic/{name}", torch.as_tensor(sequences[column])[~aborted])
    if "token_rewards" in tokens:
        metrics |= statistics("critic/rewards", whole.sums(tokens["token_rewards"])[~aborted])
    elif "reward" in sequences:
        metrics |= statistics("critic/rewards", torch.as_tensor(sequences["reward"])[~aborted])
    for column in ("advantages", "returns", "values"):
        if column in tokens:
            metrics |= statistics(f"critic/{column}", tokens[column][mask])
    if "values" in tokens and "returns" in tokens:
        metrics |= _explained_variance(tokens["values"][mask].double(), tokens["returns"][mask].double())
    for name, chosen in (("response_length", lengths >= 0), ("response_length_non_aborted", ~aborted)):
        metrics |= statistics(name, lengths[chosen])
        metrics[f"{name}/clip_ratio"] = _share(clipped[chosen])
    if "prompt_length" in sequences:
        prompts = torch.as_tensor(sequences["prompt_length"])
        metrics |= statistics("prompt_length", prompts)
        metrics["prompt_length/clip_ratio"] = _share(prompts >= max_prompt_tokens)
    return metrics


def _share(flags: Tensor) -> Value:
    return Value(float(flags.sum()), flags.numel())


def _explained_variance(values: Tensor, returns: Tensor) -> dict[str, Value]:
    """1 - Var(returns - values) / Var(returns); nothing where the returns do not vary."""
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    if not variance:
        return {}
    return {"critic/vf_explained_var": Value(1 - float((returns - values).var(correction=0)) / variance, 1.0)}


def timing_metrics(timings: Mapping[str, float], batch: Batch | None = None) -> dict[str, float]:
    """Seconds of each phase; of those that work on tokens also milliseconds per token of `batch`.

    Generation counts completion tokens, the others all tokens."""
    metrics = {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    if batch is not None:
        phases = ("ref", "values", "old_log_prob", "adv", "update_critic", "update_actor")
        counts = dict.fromkeys(phases, batch.num_tokens)
        counts["gen"] = int(batch.tokens["loss_mask"].sum())
        metrics |= {f"timing_per_token_ms/{name}": timings[name] * 1000 / count
                    for name, count in counts.items() if count and name in timings}
    return metrics


def performance_metrics(batch: Batch, timings: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Tokens (prompts included) of a step, its seconds (`timings["step"]`, or the sum of its phases), tokens per second
    and rank; memory in use on the driver's host, in GB."""
    import psutil

    seconds = timings["step"] if "step" in timings else sum(timings.values())
    return {
        "perf/total_num_tokens": float(batch.num_tokens), "perf/time_per_step": seconds,
        "perf/throughput": batch.num_tokens / (seconds * ranks),
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 1e9,
    }


def validation_metrics(sources: Sequence[str], questions: Sequence[Any],
                       scores: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`val-core|val-aux/SOURCE/VARIABLE/METRIC`, from source, question and variables of each completion.

    With n completions of a question: mean@n and std@n; and for k = 2, 4, 8, ... below n, and n: best@k, worst@k and,
    where there is a "pred", maj@k (the most frequent answer's score; ties share), each with /mean and /std. These are
    exact: mean and deviation over all sets of k different completions out of n, averaged over questions. val-core are
    mean, best and maj of the largest n and k, of "acc" (or, without it, "reward"). Values that are None or not finite
    are left out and counted as val-aux/SOURCE/VARIABLE/nonfinite."""
    found: dict[tuple[str, str], dict[Any, list[tuple[float, Any]]]] = {}
    skipped: dict[tuple[str, str], int] = {}
    for source, question, variables in zip(sources, questions, scores, strict=True):
        for name, value in variables.items():
            if name == "pred":
                continue
            if value is None or not math.isfinite(value):
                skipped[source, name] = skipped.get((source, name), 0) + 1
            else:
                groups = found.setdefault((source, name), {})
                groups.setdefault(question, []).append((float(value), variables.get("pred")))
    metrics: dict[str, float] = {}
    for (source, name), groups in found.items():
        n = max(map(len, groups.values()))
        per_question = [_question_metrics(group) for group in groups.values()]
        core = name == ("acc" if (source, "acc") in found else "reward")
        for metric in dict.fromkeys(m for one in per_question for m in one):
            values = [one[metric] for one in per_question if metric in one]
            first = core and metric.startswith(("mean", "best", "maj")) and f"@{n}" in metric
            metrics[f"val-{'core' if first else 'aux'}/{source}/{name}/{metric}"] = math.fsum(values) / len(values)
    return metrics | {f"val-aux/{s}/{name}/nonfinite": float(count) for (s, name), count in skipped.items()}


def _question_metrics(group: Sequence[tuple[float, Any]]) -> dict[str, float]:
    values, n = [value for value, _ in group], len(group)
    mean = math.fsum(values) / n
    metrics = {f"mean@{n}": mean}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / n)
    for k in [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]:
        moments = {"best": _extreme(sorted(values), k), "worst": _extreme(sorted(values, reverse=True), k)}
        if all(pred is not None for _, pred in group):
            moments["maj"] = _majority(group, k)
        for name, (first, second) in moments.items():
            metrics[f"{name}@{k}/mean"] = first
            metrics[f"{name}@{k}/std"] = math.sqrt(max(second - first**2, 0.0))
    return metrics


def _extreme(ordered: Sequence[float], k: int) -> tuple[float, float]:
    """E[x] and E[x^2] of the last in order among k of the values: item i (from 0) is it in C(i, k-1) of the sets."""
    ways, sets = [math.comb(i, k - 1) for i in range(len(ordered))], math.comb(len(ordered), k)
    return (math.fsum(w * v for w, v in zip(ways, ordered)) / sets,
            math.fsum(w * v * v for w, v in zip(ways, ordered)) / sets)


def _majority(group: Sequence[tuple[float, Any]], k: int) -> tuple[float, float]:
    """E[x] and E[x^2] over sets of k of the mean score of the most frequent answers (an answer's score: its mean).

    For every height that the highest count can have, the answers are gone through once, counting sets by size and
    number of answers at that height, with the sums over those sets of the answers' total score and of its square."""
    import numpy as np

    answers: dict[Any, list[float]] = {}
    for value, pred in group:
        answers.setdefault(pred, []).append(value)
    first = second = 0.0
    for height in range(1, k + 1):
        top = k // height
        ways = np.zeros((3, k + 1, top + 1))
        ways[0, 0, 0] = 1.0
        for values in answers.values():
            count, score = len(values), math.fsum(values) / len(values)
            new = np.zeros_like(ways)
            for votes in range(min(count, height, k) + 1):
                chosen = math.comb(count, votes) * ways[:, : k + 1 - votes]
                if votes < height:
                    new[:, votes:] += chosen
                    continue
                zero, one, two = chosen[:, :, :-1]
                new[0, votes:, 1:] += zero
                new[1, votes:, 1:] += one + score * zero
                new[2, votes:, 1:] += two + 2 * score * one + score**2 * zero
            ways = new
        tied = np.arange(1, top + 1)
        first += float((ways[1, k, 1:] / tied).sum())
        second += float((ways[2, k, 1:] / tied**2).sum())
    sets = math.comb(len(group), k)
    return first / sets, second / sets
