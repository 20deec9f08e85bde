"""Partial rollouts: completions that go on in later steps are whole, and every token is its own policy's."""

from __future__ import annotations

from collections import defaultdict

import pytest
import runs
import torch
from locally import train

from rlrun.rollout.hf import HfRollout

STILL = {"optim": {"name": "sgd", "lr": 1e-30}}
ROUND, LIMIT = 4, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return runs.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def seen(monkeypatch):
    """What a run in this process draws and trains on. A tenth of the tokens end a completion."""
    from rlrun import launch
    from rlrun.collector import RolloutCollector

    monkeypatch.setattr(launch, "eos_ids", lambda *_: tuple(range(1, 27)))
    generate, load, hand_out = HfRollout.generate, HfRollout.load_weights, RolloutCollector.next
    found = {"pieces": defaultdict(list), "weights": {}, "batches": [], "most": 0}

    def generating(self, requests, params):
        drawn = generate(self, requests, params)
        found["most"] = max(found["most"], params.max_new_tokens)
        asked = {r.index: r for r in requests}
        for c in drawn:
            found["pieces"][asked[c.index].key].append((asked[c.index], c))
        return drawn

    def loading(self, weights, version):
        load(self, weights, version)
        found["weights"][version] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        found["model"] = self.model

    def handing_out(self, *args):
        batch, metrics = hand_out(self, *args)
        found["batches"].append(batch and batch.select(range(len(batch))))
        return batch, metrics

    monkeypatch.setattr(HfRollout, "generate", generating)
    monkeypatch.setattr(HfRollout, "load_weights", loading)
    monkeypatch.setattr(RolloutCollector, "next", handing_out)
    return found


def write(directory, model, steps, tokens=ROUND, actor=None, **options):
    stage = runs.grpo(steps, correction="token_tis", **options)
    rollout = {"tokens_per_round": tokens, "max_new_tokens": LIMIT, "gap_fraction": 1.0}
    return runs.write_run(directory, model, stage, rollout=rollout, actor=actor or {})


def rows(batches):
    """(group, ids, log-probabilities, finish_reason, number of drawn tokens) of every trained sample."""
    return [(int(b.sequences["group"][i]), b.tokens["ids"][at].tolist(), b.tokens["rollout_log_probs"][at],
             b.sequences["finish_reason"][i], int(b.tokens["loss_mask"][at].sum()))
            for b in batches if b is not None
            for i, at in enumerate(slice(*ends) for ends in b.cu_seqlens.unfold(0, 2, 1).tolist())]


def test_an_unchanged_policy_draws_the_same(model, tmp_path, seen):
    """With weights that stay, whole completions, their log-probabilities and ends are those of a run without the option,
    whether a step takes what is complete after one round or fills up. The limit marks a completion as truncated."""
    train(write(tmp_path / "whole", model, 5, None, actor=STILL))
    expected = {(group, tuple(ids)): (log_probs, end) for group, ids, log_probs, end, _ in rows(seen["batches"])}
    assert {end for _, end in expected.values()} == {"stop", "length"}
    for name, rounds in (("once", 1), ("filled", 8)):
        seen["batches"].clear()
        seen["most"] = 0
        metrics = train(write(tmp_path / name, model, 5, actor=STILL, max_rounds=rounds))
        found = rows(seen["batches"])
        assert len(found) >= 20
        for group, ids, log_probs, end, _ in found:
            same, same_end = expected[group, tuple(ids)]
            assert end == same_end
            torch.testing.assert_close(log_probs, same, atol=1e-5, rtol=0)
        assert {drawn for *_, end, drawn in found if end == "length"} == {LIMIT}
        assert seen["most"] == ROUND, "no round takes longer than its tokens"
        assert sum(row["rollout/carried"] for row in metrics if "rollout/carried" in row) > 0
        if rounds == 8:
            assert all(len(b) == 16 for b in seen["batches"])


def test_every_token_is_of_the_policy_that_drew_it(model, tmp_path, seen):
    """While the policy moves: requests go on from the tokens there are, log-probabilities are those under the weights of each
    token's own version, samples bear the version that began them, and the gap counts only the newest tokens."""
    metrics = train(write(tmp_path, model, 6, max_rounds=1))
    by_stream = {}
    for pieces in seen["pieces"].values():
        stream, log_probs, versions = pieces[0][0].prompt_ids, [], []
        for request, completion in pieces:
            assert (request.prompt_ids, request.drawn) == (stream, len(log_probs))
            stream += completion.ids
            versions += [completion.policy_version] * len(completion.ids)
            seen["model"].load_state_dict(seen["weights"][completion.policy_version])
            with torch.no_grad():
                logits = seen["model"](torch.tensor([stream])).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
            log_probs += logits.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0].tolist()
        by_stream[stream] = log_probs, versions
    assert max(len(set(versions)) for _, versions in by_stream.values()) == 3
    several = 0
    for step, batch in enumerate(seen["batches"]):
        for i, (_, ids, log_probs, *_) in enumerate(rows([batch])):
            expected, versions = by_stream[tuple(ids)]
            torch.testing.assert_close(log_probs[-len(expected):], torch.tensor(expected), atol=1e-5, rtol=0)
            assert int(batch.sequences["policy_version"][i]) == versions[0]
            at = slice(*batch.cu_seqlens[i : i + 2].tolist())
            assert batch.tokens["gap_mask"][at].tolist()[-len(expected):] == [v == step for v in versions]
            several += len(set(versions)) > 1
    assert several > 10
    assert max(row["rollout/gap_max"] for row in metrics if "rollout/gap_max" in row) < 1e-4
    assert max(row["rollout/staleness/max"] for row in metrics if "rollout/staleness/max" in row) >= 2


def test_groups_are_whole_and_the_oldest_come_first(model, tmp_path, seen):
    """Every trained group has all its samples; none comes twice; what is complete early waits and no prompt is lost."""
    metrics = train(write(tmp_path, model, 6))
    groups = [group for group, *_ in rows(seen["batches"])]
    assert all(groups.count(group) == 4 for group in groups)
    drawn = {int(key.split("|")[1]) for key in seen["pieces"]}
    assert drawn == set(range(max(drawn) + 1))
    last = [row for row in metrics if "rollout/carried" in row][-1]
    assert last["rollout/carried"] + last["rollout/waiting"] == 4 * len(drawn) - len(groups)
    assert min(drawn - set(groups)) > max(drawn) - 12, "nothing is left behind"
    assert len(drawn - set(groups)) < 8, "no more than about a step's prompts are under way"


def test_resume_is_exact(model, tmp_path, seen):
    """Cut off after the third step, with completions under way, a run ends bit for bit as if it had not been."""
    whole = train(write(tmp_path / "whole", model, 6))
    assert whole[2]["rollout/carried"] > 0
    path = write(tmp_path / "cut", model, 6)
    train(path, "stages.0.steps=3")
    assert train(path) == whole
