"""A whole run whose sequences are spread over ranks."""

from __future__ import annotations

import math

import locally
import pytest
import runs


@pytest.mark.slow
def test_run_over_two_ranks(tmp_path, model):
    """Cases 56, 60: PPO with a critic, a reference and micro-batches by token budget takes the same steps, with the same
    metrics, over two ranks that share each sequence as on one rank without the plugin. (Two ranks could not share an update
    of one sample otherwise.)"""
    ppo = runs.grpo(2, name="ppo", prompts_per_update=1, kl_coef=0.05, kl_in="reward", entropy_coef=0.01)
    actor = {"optim": {"name": "sgd", "lr": 0.1}, "tokens_per_micro_batch": 24}
    sections = {"actor": actor, "rollout": {"samples_per_prompt": 1}}
    alone = runs.write_run(tmp_path / "alone", model, ppo, **sections)
    spread = runs.write_run(tmp_path / "spread", model, ppo, **sections, resources=runs.ray(2))
    done = runs.rl_run(spread, "ulysses.size=2", "-p", "ulysses")
    assert done.returncode == 0, done.stderr
    got, expected = runs.comparable(runs.metrics(tmp_path / "spread/run")), locally.train(alone)
    assert len(got) == len(expected) == 2
    for ours, theirs in zip(got, expected):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert math.isclose(ours[name], value, rel_tol=1e-3, abs_tol=1e-5), (name, ours[name], value)
    assert expected[-1]["actor/grad_norm"] > 0
