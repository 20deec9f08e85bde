"""What the algorithm asks for, refuses, filters, keeps; and that the reward model learns the same however the work is spread."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rlrun.algorithms.policy_gradient import PolicyAlgorithm
from rlrun.batch import Batch
from rlrun.config.schema import OptimConfig
from rlrun.metrics import merge, results
from rlrun.plugins import Plugins
from rlrun.testing.gloo import drive
from rlrun.testing.tiny import save_tiny
from rlrun_prime.algorithm import Prime


@pytest.mark.parametrize(("prime", "algorithm", "said"), [
    ({}, {"advantage": "remax"}, "remax has no form with process rewards"),
    ({}, {"advantage": "opo"}, "opo has no form"),
    ({}, {"advantage": "pass_at_k"}, "pass_at_k has no form"),
    ({"accuracy_range": [0.8, 0.2]}, {}, "low <= high"),
    ({"accuracy_range": [0.2]}, {}, "two numbers"),
    ({"process_coef": 0.0, "outcome_coef": 0.0}, {}, "both 0"),
    ({"granularity": "segment", "delimiter": ""}, {}, "needs a prime.delimiter"),
    ({"reference": "policy", "reference_path": "x"}, {}, "no effect"),
    ({"update": "none"}, {}, "every process reward 0"),
    ({"leftovers": "keep", "oversample": 2.0}, {}, "algorithm.correction"),
    ({"leftovers": "keep"}, {"correction": "token_tis"}, "oversample > 1"),
    ({"optim": OptimConfig(warmup_steps=2)}, {}, "leaves none of the 2 updates"),
])
def test_what_is_refused(tools, prime, algorithm, said):
    """Before any model loads, with the keys and what to do."""
    with pytest.raises(ValueError, match=said):
        tools.make(prime, **algorithm)


def test_tokenizers_must_be_the_same(tools, gpt2, tmp_path):
    """The reward model sees the policy's ids: another vocabulary or chat template is refused."""
    from rlrun.models.folder import load_tokenizer

    other = tmp_path / "other"
    save_tiny(other, "gpt2")
    tools.make({"path": str(other)}, path=gpt2)
    tokenizer = load_tokenizer(str(other))
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(tmp_path / "more")
    with pytest.raises(ValueError, match="another vocabulary"):
        tools.make({"path": str(tmp_path / "more")}, path=gpt2)


def test_roles(tools):
    """The reward model has an optimizer and number of updates of its own; its reference is no second copy of the policy's."""
    roles = tools.make({}, prompts_per_update=2, epochs_per_step=3).roles()
    assert list(roles) == ["prm", "prm_ref"]
    assert (roles["prm"].trainable, roles["prm_ref"].trainable) == (True, False)
    assert roles["prm"].updates_per_step == 2
    assert roles["prm"].optim.lr == 20.0
    a = tools.make({"reference": "policy"})
    assert list(a.roles()) == ["prm"]
    assert a.needs_old_log_probs
    assert list(tools.make({}, kl_coef=0.1).roles()) == ["ref", "prm"]
    assert list(tools.make({}, advantage="gae").roles()) == ["critic", "prm", "prm_ref"]


def group_of(tools, correct, reasons=None, number=0):
    batch = tools.ragged([[1]] * len(correct), [number] * len(correct), correct)
    batch.sequences["finish_reason"] = reasons or ["stop"] * len(correct)
    batch.tokens |= {"gap_mask": batch.tokens["loss_mask"].clone(), "rollout_log_probs": torch.tensor([0.0, -1.5] * len(correct))}
    return batch


def test_prompt_filter(tools):
    """Mean accuracy inside [.2, .8], bounds included whatever the rounding; a truncated sample drops its prompt; rates."""
    groups = [group_of(tools, c, r) for c, r in [
        ([0, 0, 0, 0, 0], None), ([1, 0, 0, 0, 0], None), ([1, 1, 1, 1, 0], None), ([1, 1, 1, 1, 1], None),
        ([1, 0, 1, 0, 0], ["stop"] * 4 + ["length"]), ([0.5, 0.3, 0.1, 0.1, 0.0], None)]]
    for group in groups:
        group.sequences["correct"] = group.sequences["correct"].float()
    a = tools.make()
    assert a.select(groups) == [False, True, True, False, False, True]
    assert results(a.drawn(groups)) == pytest.approx(
        {"prime/filter/too_hard": 1 / 6, "prime/filter/too_easy": 1 / 6, "prime/filter/truncated": 1 / 6})
    assert tools.make({"drop_truncated": False, "accuracy_range": [0.0, 1.0]}).select(groups) == [True] * 6
    assert tools.make({"oversample": 1.5}).draws(3) == 5


def test_leftovers(tools):
    """Dropped by default; kept ones survive as JSON bit for bit, behaviour log-probabilities included, and leave the gap."""
    groups = [group_of(tools, [1, 0], number=number) for number in (3, 8)]
    dropping = tools.make({"oversample": 2.0})
    dropping.leave(groups)
    assert dropping.leftovers == []
    keeping = {"leftovers": "keep", "oversample": 2.0}
    a, b = (tools.make(keeping, correction="token_tis") for _ in "ab")
    a.leave(groups)
    a.steps = 7
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert b.steps == 7
    for mine, kept in zip(b.leftovers, groups, strict=True):
        assert torch.equal(mine.tokens["rollout_log_probs"], kept.tokens["rollout_log_probs"])
        assert torch.equal(mine.sequences["group"], kept.sequences["group"])
        assert mine.sequences["finish_reason"] == kept.sequences["finish_reason"]
        assert not mine.tokens["gap_mask"].any()
    c = tools.make(keeping, correction="token_tis")
    c.load_state_dict(b.state_dict() | {"leftovers": ""})
    assert c.leftovers == []


def test_outcomes_outside_0_to_1_are_refused(tools):
    batch = group_of(tools, [1, 2])
    with pytest.raises(ValueError, match='goes from 1 to 2: return it as "correct"'):
        tools.make().score(batch, None)


def test_nothing_to_learn_from(tools):
    """Pairs of equal outcomes teach nothing: the model is as it was, and scores count as those before its update."""
    class Workers:
        roles = {"prm_ref": None}

        def forward(self, role, batch, want, temperature):
            return {"log_probs": torch.full((batch.num_tokens,), -1.0 if role == "prm" else -3.0)}

    batch = tools.ragged([[1, 1], [1]], [0, 0], [1, 1])
    tools.make({"loss": "dpo", "beta": 0.5}, prompts_per_step=1).score(batch, Workers())
    assert batch.sequences["process_reward_before"].tolist() == [2.0, 1.0]
    assert "process_reward_after" not in batch.sequences


def recorded():
    """Ragged samples of 4 prompts in no order, one of them empty, one prompt with a single sample; fractional outcomes."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 5, 2, 6, 4, 1, 5, 3, 2, 4, 0]
    rows = [{"ids": (2 + torch.randint(0, 256, (2 + n,), generator=generator)).tolist(), "loss_mask": [False] * 2 + [True] * n}
            for n in lengths]
    batch = Batch.from_sequences(rows, {
        "group": torch.tensor([1, 0, 1, 2, 0, 2, 1, 2, 0, 5, 1]), "finish_reason": ["stop"] * 11,
        "correct": torch.tensor([1, 0, 0.5, 1, 1, 0, 0, 0.25, 1, 1, 1], dtype=torch.float64)})
    batch.sequences["reward"] = batch.sequences["correct"].clone()
    return batch


MODES = {
    "after, one update": {},
    "after, two updates": {"algorithm": {"prompts_per_update": 2}},
    "before, two updates, dpo": {"algorithm": {"prompts_per_update": 2}, "prime": {"update": "before", "loss": "dpo"}},
    "policy as reference, code's form": {"prime": {"reference": "policy", "advantage": "reference", "granularity": "whole"}},
    "grpo, segments": {"algorithm": {"advantage": "grpo"}, "prime": {"granularity": "segment", "delimiter": "a"}},
}


def train(workers, plugins, config, batch, part):
    """Two steps in each mode: what was learned and what the advantages are."""
    found = {}
    base = {"update": "after", "loss": "ce", "reference": "sft", "advantage": "paper", "granularity": "token"}
    for name, mode in MODES.items():
        if part not in name:
            continue
        vars(config.prime).update(base | mode.get("prime", {}))
        options = replace(config.stages[0].algorithm, **{"advantage": "rloo", **mode.get("algorithm", {})})
        algorithm = Prime(config, replace(config.stages[0], algorithm=options))
        workers.keep([])
        for role, request in algorithm.roles().items():
            workers.build(role, replace(request, path=config.model.path), 4, frozenset({"log_probs"}))
        for step in (0, 1):
            b = Batch(batch.cu_seqlens, dict(batch.tokens), dict(batch.sequences))
            b.tokens["log_probs"] = workers.forward("prm", b, {"log_probs"}, 1.0)["log_probs"]  # a policy that equals it
            metrics = results(merge([algorithm.score(b, workers), algorithm.advantages(b)]))
            metrics.pop("timing_s/prm")
            columns = {k: v for k, v in (b.tokens | b.sequences).items() if k.startswith(("process", "adv"))}
            found[name, step] = metrics, columns, workers.call("weights", "prm")[0]
    return found


def test_ranks_micro_batches_and_order(tools, gpt2, ranks1, ranks2):
    """1 or 2 ranks, any micro-batch, any order of rows: equal rewards, advantages, losses, weights. At step 0 rewards are
    exactly 0 and the loss is ln 2; then not."""
    config = tools.make_config(gpt2)
    batch = recorded()
    expected = drive(ranks1, config, train, batch, "")
    for (name, step), (metrics, columns, _) in expected.items():
        first = columns["process_reward_before"]
        if step == 0 and "two" not in name:
            assert not first.any(), name
            assert metrics["prime/loss"] == pytest.approx(0.6931471805599453, abs=1e-12)
        if step == 1 and "policy" not in name:
            assert float(first.abs().max()) > 1e-3, name
        assert ("process_reward_after" in columns) == ("before" in name)
        assert metrics["prime/grad_norm"] > 0
        assert metrics["prime/lr"] == 20.0
    config.actor.tokens_per_micro_batch = 35
    order = torch.tensor([7, 2, 9, 10, 0, 4, 8, 1, 6, 3, 5])
    shuffled = batch.select(order)
    got = drive(ranks2, config, train, shuffled, "")
    got |= drive(ranks2, config, train, batch, "two")  # mini-batches are of the batch's order of prompts
    for key, (metrics, columns, weights) in expected.items():
        assert got[key][0] == pytest.approx(metrics, rel=1e-9, abs=1e-9), key
        whole = Batch(batch.cu_seqlens, {k: v for k, v in columns.items() if len(v) == batch.num_tokens},
                      {k: v for k, v in columns.items() if len(v) == len(batch)})
        whole = whole if "two" in key[0] else whole.select(order)
        for name, column in (whole.tokens | whole.sequences).items():
            torch.testing.assert_close(got[key][1][name], column, rtol=1e-9, atol=1e-9, msg=f"{key} {name}")
        for name, weight in weights.items():
            assert (got[key][2][name] - weight).norm() <= 1e-9 * weight.norm() + 1e-12, (key, name)


def scores(workers, plugins, config, batch):
    """The rewards that were used in a second step, and those of the models before and after it, by forwards of their own."""
    found = {}
    for update, each in (("after", 4), ("after", 2), ("before", 2)):
        config.prime.update = update
        config.stages[0].algorithm.prompts_per_update = each
        algorithm = Prime(config, config.stages[0])
        workers.keep([])
        for role, request in algorithm.roles().items():
            workers.build(role, replace(request, path=config.model.path), 4, frozenset({"log_probs"}))

        def now(b):
            prm, ref = (workers.forward(role, b, {"log_probs"}, 1.0)["log_probs"] for role in ("prm", "prm_ref"))
            return torch.where(b.tokens["loss_mask"], 0.05 * (prm - ref), 0)

        for _ in range(2):
            b = Batch(batch.cu_seqlens, dict(batch.tokens), dict(batch.sequences))
            before = now(b)
            algorithm.score(b, workers)
        found[update, each] = b.tokens["process_rewards"], before, now(b)
    return found


def test_which_model_scores(tools, gpt2, ranks1):
    """after: the model before the step's updates scores all samples, by the only update's own forward or by one before several;
    before: the updated one."""
    config = tools.make_config(gpt2)
    for (update, each), (used, before, after) in drive(ranks1, config, scores, recorded()).items():
        assert float((before - after).abs().max()) > 1e-4
        torch.testing.assert_close(used, before if update == "after" else after, rtol=1e-9, atol=1e-12, msg=f"{update} {each}")


def test_a_model_that_diverges_ends_the_run(tools):
    """Updates that are skipped in a row for a non-finite gradient end the run as the actor's do; one that is not resets that."""
    from rlrun.errors import RunError
    from rlrun.metrics import Value

    a = tools.make()
    for skipped in [1, 1, 1, 1, 0, 1, 1, 1, 1]:
        a._count_skips({"skipped": Value(float(skipped))})
    with pytest.raises(RunError, match="5 updates of the prm in a row"):
        a._count_skips({"skipped": Value(1.0)})


def test_the_name_alone_takes_rloo():
    """The preset of the plugin's name; without the plugin's algorithm nothing of core knows of it."""
    assert Plugins.load(["prime"]).presets["prime"] == {"advantage": "rloo"}
    assert issubclass(Prime, PolicyAlgorithm)
