"""Validation: completions of the held-out questions and their rewards; offline, what the algorithm says of their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlrun.collector import answer_batch
from rlrun.environments.turns import Episode
from rlrun.metrics import results, validation_metrics

if TYPE_CHECKING:
    from rlrun.algorithms.base import Algorithm
    from rlrun.generation import Generator
    from rlrun.launch import Run


def validate(run: Run, algorithm: Algorithm, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics of the policy after `step` steps, and records of completions where any were drawn."""
    metrics = {} if algorithm.online else evaluate(run, algorithm)
    if run.generator is None:
        return metrics, []
    run.workers.sync(step)
    generated, records = generate(run, run.generator)
    return metrics | generated, records


def evaluate(run: Run, algorithm: Algorithm) -> dict[str, float]:
    """`val-core/SOURCE/VARIABLE/mean` of an offline algorithm on the held-out answers, by forward passes alone."""
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(s.data_source for s in run.validation):
        samples = [s for s in run.validation if s.data_source == source]
        batch = answer_batch(list(enumerate(samples)), algorithm, run.tokenizer)
        for role, column in (("actor", "log_probs"), ("ref", "ref_log_probs")):
            if role in run.workers.roles:
                outputs = run.workers.forward(role, batch, {"log_probs"}, algorithm.temperature, algorithm.atom)
                batch.tokens[column] = outputs["log_probs"]
        found = results(algorithm.evaluate(batch))
        metrics |= {f"val-core/{source}/{name}/mean": value for name, value in found.items()}
    return metrics


def generate(run: Run, generator: Generator) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics of scored completions (see `validation_metrics`), and their records."""
    v = run.config.validation
    episodes = [Episode(i, s, f"validation|{s.uid}|{n}")
                for i, s in enumerate(run.validation) for n in range(v.samples_per_prompt)]
    rollouts = generator.run(episodes, generator.params(v.temperature, v.top_p, 0))
    metrics = validation_metrics(
        [s.data_source for s in rollouts.samples], rollouts.groups,
        [{"reward": s.reward, "acc": None if s.reward is None else s.correct, "pred": s.pred} for s in rollouts.scores],
    )
    return metrics, rollouts.records()
