"""Whole runs of PRIME: exact resume, what is listed but not chosen, leftovers, validation, every key read."""

from __future__ import annotations

import pytest
import runs
from locally import load, train

SECTION = {"accuracy_range": [0.0, 1.0], "drop_truncated": False, "optim": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1}}
STOPPER = '''
import os
from rlrun.hookspecs import PluginInfo, hookimpl

@hookimpl
def plugin_info():
    return PluginInfo("stopper", 1)

@hookimpl
def compute_metrics(step):
    if step.number > 2 and os.environ.get("STOP"):
        raise KeyboardInterrupt
    return {}
'''


def write(directory, model, steps=4, section=None, algorithm=None, **sections):
    return runs.write_run(directory, model, runs.grpo(steps, name="prime", advantage="rloo", **(algorithm or {})),
                          plugins=["fsdp", "prime"], prime={**SECTION, **(section or {})}, **sections)


@pytest.mark.parametrize("case", ["leftovers", "before"])
def test_resume_is_exact(case, model, tmp_path, monkeypatch):
    """2 + 2 steps equal 4, bit for bit: reward model, its optimizer and schedule, warm-up, leftovers; one update or two."""
    section, algorithm = {
        "leftovers": ({"leftovers": "keep", "oversample": 2.0, "accuracy_range": [0.4, 1.0], "warmup_steps": 3},
                      {"correction": "token_tis"}),
        "before": ({"update": "before", "reference": "policy", "loss": "dpo", "advantage": "reference"},
                   {"prompts_per_update": 2}),
    }[case]
    rows = {"data": {"train": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "train.jsonl", 16))}]}}
    expected = train(write(tmp_path / "whole", model, 4, section, algorithm, **rows))
    part = write(tmp_path / "part", model, 4, section, algorithm, checkpoint={"every": 2}, **rows)
    (tmp_path / "stopper.py").write_text(STOPPER)
    with monkeypatch.context() as patch:
        patch.setenv("STOP", "1")
        with pytest.raises(KeyboardInterrupt):
            train(part, add=[str(tmp_path / "stopper.py")])
    assert train(part) == expected
    assert [row["prime/lr"] for row in expected] != [1e-2] * 4
    if case == "leftovers":
        assert expected[0]["prime/before/reward_std"] == 0 < expected[1]["prime/before/reward_std"]
        assert all(row["prime/leftovers"] for row in expected[:2])
        assert any(row["prime/filter/too_hard"] for row in expected)


@pytest.mark.parametrize("leftovers", ["drop", "keep"])
def test_groups_are_of_one_policy(leftovers, model, tmp_path, monkeypatch):
    """Case 75: every group that PRIME scores is whole and of one policy version, also one that waited from an earlier step, and a
    batch without a column that it needs is refused by name."""
    from rlrun_prime.algorithm import Prime

    score, seen = Prime.score, []

    def look(self, batch, workers):
        versions: dict[int, list[int]] = {}
        for group, version in zip(batch.sequences["group"].tolist(), batch.sequences["policy_version"].tolist(), strict=True):
            versions.setdefault(group, []).append(version)
        seen.append(versions)
        for place, name in ((batch.sequences, "correct"), (batch.sequences, "group"), (batch.tokens, "loss_mask")):
            column = place.pop(name)
            with pytest.raises(ValueError, match=f"it has no {name}:"):
                score(self, batch, workers)
            place[name] = column
        return score(self, batch, workers)

    monkeypatch.setattr(Prime, "score", look)
    section = {"leftovers": leftovers, "accuracy_range": [0.0, 1.0], "oversample": 2.0 if leftovers == "keep" else 1.0}
    train(write(tmp_path, model, 3, section, {"correction": "token_tis"}))
    assert len(seen) == 3
    assert all(len(of) == 4 and len(set(of)) == 1 for versions in seen for of in versions.values())
    ages = [{step - of[0] for of in versions.values()} for step, versions in enumerate(seen)]
    assert ages == ([{0}, {0}, {0}] if leftovers == "drop" else [{0}, {1}, {0}])


def test_listed_but_not_chosen_does_nothing(model, tmp_path):
    """A GRPO run with the plugin in its list is the run without it."""
    plain, listed = (runs.write_run(tmp_path / name, model, runs.grpo(2), plugins=["fsdp", *more])
                     for name, more in (("plain", []), ("listed", ["prime"])))
    assert train(listed) == train(plain)


def test_validation_is_what_it_is_without(model, tmp_path):
    """Case 74: with PRIME on, the score of validation at step 0 is that of GRPO's run with the same model."""
    data = {"train": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "train.jsonl", 16))}],
            "validation": [{"kind": "jsonl", "path": str(runs.write_questions(tmp_path / "other.jsonl", 5, 50))}]}
    prime = write(tmp_path / "prime", model, 2, data=data, validation={"at_start": True})
    grpo = runs.write_run(tmp_path / "grpo", model, runs.grpo(2), data=data, validation={"at_start": True})
    key = "val-core/other/acc/mean@1"
    assert train(prime)[0][key] == train(grpo)[0][key]


def test_name_and_options(model, tmp_path):
    """The name takes leave-one-out; an advantage without a form is refused with the forms that there are; a group of one too."""
    from rlrun import launch
    from rlrun.errors import ConfigError

    path = runs.write_run(tmp_path, model, {"algorithm": {"name": "prime", "prompts_per_step": 4}, "steps": 2},
                          plugins=["fsdp", "prime"])
    assert load(path)[0].stages[0].algorithm.advantage == "rloo"
    assert load(path)[0].section("prime", object).optim.clip_grad == 10.0
    with pytest.raises(ConfigError, match="must be at least 2"):
        load(path, "rollout.samples_per_prompt=1")
    with pytest.raises(ConfigError, match="remax has no form with process rewards"):
        launch.run(*load(path, "stages.0.algorithm.advantage=remax"))
    with pytest.raises(ConfigError, match="prime.optim.betas"):
        load(path, "prime.optim.betas=[0.9]")


def test_every_key_is_read(model, tmp_path):
    """Case 78: no key of the section is taken and never used."""
    from rlrun import launch
    from rlrun.testing.recording import leaf_keys, recording

    path = write(tmp_path, model, 2, {"granularity": "segment", "delimiter": "1"})
    config, plugins = load(path)
    stand_in, read = recording(config)
    assert launch.run(stand_in, plugins) == 0
    assert {key for key in leaf_keys(type(config)) - read if key.startswith("prime.")} <= {
        f"prime.optim.{name}" for name in ("decay_fraction",)}  # of schedule wsd alone
