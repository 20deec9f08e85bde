import json
from collections import Counter

import pytest

from rlrun.data.sample import Sample
from rlrun.data.sampler import Sampler


def source(name, count, text=None):
    return [Sample(f"{name}/{i}", text or f"{name} {i}", (1, i), "", name) for i in range(count)]


def uids(draws):
    return [draw.sample.uid for draw in draws]


def test_every_row_once_an_epoch_in_an_order_of_its_own():
    sampler = Sampler([source("a", 10)], [1.0], seed=3)
    epochs = [sampler.take(10) for _ in range(3)]
    for number, draws in enumerate(epochs):
        assert sorted(uids(draws)) == sorted(f"a/{i}" for i in range(10))
        assert {draw.epoch for draw in draws} == {number}
    assert [d.number for draws in epochs for d in draws] == list(range(30))
    assert len({tuple(uids(draws)) for draws in epochs}) == 3
    assert uids(Sampler([source("a", 10)], [1.0], seed=3).take(10)) == uids(epochs[0])
    assert uids(Sampler([source("a", 10)], [1.0], seed=4).take(10)) != uids(epochs[0])


def test_without_shuffling_the_order_is_the_files():
    sampler = Sampler([source("a", 4)], [1.0], shuffle=False)
    assert uids(sampler.take(3)) + uids(sampler.take(3)) == ["a/0", "a/1", "a/2", "a/3", "a/0", "a/1"]


@pytest.mark.parametrize("stop", range(13))
def test_resumed_at_any_draw_the_order_is_the_uninterrupted_one(stop):
    """Case 46, 47, 49, 50: at an epoch's end, mid-epoch, in later epochs, with two sources; through JSON."""
    def new():
        return Sampler([source("a", 7), source("b", 16)], [2.0, 1.0], seed=5)

    whole, first, second = new(), new(), new()
    expected = [draw for _ in range(13) for draw in whole.take(4)]
    before = [draw for _ in range(stop) for draw in first.take(4)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.epoch == first.epoch
    assert before + [draw for _ in range(13 - stop) for draw in second.take(4)] == expected
    assert {draw.epoch for draw in expected if draw.sample.data_source == "a"} == {0, 1, 2, 3, 4}


def test_epoch_boundary_of_whole_batches():
    """Case 46: 4 batches an epoch, 2 epochs; stopped after 3, 4 or 5 batches, the rest follows."""
    def new():
        return Sampler([source("a", 8)], [1.0], seed=1)

    assert new().steps(2, 2) == 8
    whole = new()
    expected = [uids(whole.take(2)) for _ in range(8)]
    for stop in (3, 4, 5):
        first, second = new(), new()
        for _ in range(stop):
            first.take(2)
        second.load_state_dict(first.state_dict())
        assert [uids(second.take(2)) for _ in range(8 - stop)] == expected[stop:]


def test_weights_hold_at_every_moment():
    sampler = Sampler([source("a", 50), source("b", 50), source("c", 50)], [5.0, 3.0, 2.0])
    seen = Counter()
    for number in range(1, 201):
        seen[sampler.take(1)[0].sample.data_source] += 1
        for name, share in zip("abc", (0.5, 0.3, 0.2)):
            assert abs(seen[name] - share * number) < 1
    assert seen == {"a": 100, "b": 60, "c": 40}


def test_epochs_over_several_sources_go_through_each_at_its_share():
    even = Sampler([source("a", 10), source("b", 30)], [1.0, 1.0])
    assert even.draws_per_epoch == 60
    seen = set(uids(even.take(40)) + uids(even.take(20)))
    assert seen == {f"a/{i}" for i in range(10)} | {f"b/{i}" for i in range(30)}
    assert Sampler([source("a", 10), source("b", 30)], [1.0, 3.0]).draws_per_epoch == 40
    assert Sampler([source("a", 30)], [0.1]).draws_per_epoch == 30
    assert Sampler([source("a", 10)], [1.0]).steps(3, 4) == 7


def test_fewer_rows_than_a_step_needs_is_an_error():
    """Case 10: 3 rows with batch 4 is an error, not 0 steps."""
    for act in (lambda s: s.take(4), lambda s: s.steps(1, 4), lambda s: s.steps(100, 4)):
        with pytest.raises(ValueError, match="needs 4 prompts, but the training data have 3 rows"):
            act(Sampler([source("a", 3)], [1.0]))
    with pytest.raises(ValueError, match=r"data\.train"):
        Sampler([], [])


def test_the_same_text_twice_is_two_draws():
    """Case 17: a prompt that comes twice in a batch makes two groups of n, not one of 2n."""
    draws = Sampler([source("a", 2, text="same"), source("b", 2, text="same")], [1.0, 1.0]).take(4)
    n = 3
    groups = Counter(draw.number for draw in draws for _ in range(n))
    assert groups == {0: n, 1: n, 2: n, 3: n}
    assert len({draw.sample.uid for draw in draws}) == 4


def test_reuse_of_a_step_leaves_the_order_alone():
    """Case 15: 8 prompts, batch 4, 3 passes over each batch: the chunk comes three times, each prompt equally often."""
    sampler = Sampler([source("a", 8)], [1.0], seed=2)
    chunks = [uids(sampler.take(4)) for _ in range(2)]
    passes = [chunk for chunk in chunks for _ in range(3)]
    assert Counter(uid for chunk in passes for uid in chunk) == {f"a/{i}": 3 for i in range(8)}


def test_changed_data_are_refused():
    state = Sampler([source("a", 3)], [1.0]).state_dict()
    with pytest.raises(ValueError, match=r"\[3\] rows, now they have \[4\]"):
        Sampler([source("a", 4)], [1.0]).load_state_dict(state)
