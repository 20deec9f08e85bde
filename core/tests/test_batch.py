"""Batch: columns, selection, splitting by tokens, balancing, and the way back."""

import random

import pytest
import torch

from rlrun.batch import Batch, balance, inverse, micro_batches, shard


def make(lengths, groups=None, seed=0):
    dice = random.Random(seed)
    rows = [{"ids": [dice.randrange(50) for _ in range(n)], "loss_mask": [i > 0 for i in range(n)]} for n in lengths]
    sequences = {"uid": [f"s{i}" for i in range(len(lengths))], "row": torch.arange(len(lengths))}
    if groups is not None:
        sequences["group"] = torch.tensor(groups)
    return Batch.from_sequences(rows, sequences)


def test_select_then_inverse_gives_the_batch_back():
    batch = make([3, 1, 5, 2, 4])
    parts = [[4, 0], [2], [], [3, 1]]
    moved = Batch.concat([batch.select(p) for p in parts if p])
    assert moved.sequences["uid"] == ["s4", "s0", "s2", "s3", "s1"]
    back = moved.select(inverse(parts))
    assert back.sequences["uid"] == batch.sequences["uid"]
    assert torch.equal(back.tokens["ids"], batch.tokens["ids"])
    assert torch.equal(back.cu_seqlens, batch.cu_seqlens)


def test_position_ids_restart_and_sequence_ids_count():
    batch = make([3, 1, 2])
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_keep_to_the_limit_and_hold_every_row_once(seed):
    dice = random.Random(seed)
    lengths = [dice.randint(1, 30) for _ in range(dice.randint(1, 40))]
    batch = make(lengths)
    for limit in (30, 37, 64, 1000):
        parts = micro_batches(batch, limit)
        assert sorted(r for p in parts for r in p) == list(range(len(lengths)))
        assert max(sum(lengths[r] for r in p) for p in parts) <= limit
    assert len(micro_batches(batch, 10**9, at_least=5)) == 5


def test_a_sequence_over_the_limit_is_an_error_that_names_the_keys():
    with pytest.raises(ValueError, match=r"31 tokens.*30.*tokens_per_micro_batch"):
        micro_batches(make([5, 31]), 30)


def test_groups_are_never_cut():
    groups = [7, 3, 7, 3, 9, 9, 9]
    batch = make([4, 2, 4, 2, 1, 1, 1], groups)
    for parts in (micro_batches(batch, 8, "group"), shard(batch, 2, "group")):
        where = {}
        for i, rows in enumerate(parts):
            for row in rows:
                where.setdefault(groups[row], set()).add(i)
        assert all(len(w) == 1 for w in where.values())
    with pytest.raises(ValueError, match="no column 'pair'"):
        micro_batches(batch, 8, "pair")


def test_shards_are_balanced():
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]
    loads = [sum(lengths[i] for i in part) for part in balance(lengths, 2)]
    assert loads == [22, 22]
    assert balance([5, 5], 4) == [[0], [1], [], []]


def test_denominators_count_only_what_has_loss_tokens():
    """Case 18 (the kind): an empty response counts in no denominator."""
    rows = [{"ids": [1, 2, 3], "loss_mask": [False] * 3}, {"ids": [1, 2, 3], "loss_mask": [False, True, True]},
            {"ids": [1, 2], "loss_mask": [False, True]}]
    batch = Batch.from_sequences(rows, {"group": torch.tensor([0, 1, 1])})
    assert batch.denominators() == {"tokens": 3, "sequences": 2, "constant": 1, "groups": 1}


def test_sums_select_and_never_multiply():
    """Case 89 (the kind): what the mask leaves out may be NaN."""
    batch = Batch.from_sequences([{"ids": [1, 2, 3], "loss_mask": [False, True, True]}])
    assert batch.sums(torch.tensor([float("nan"), 2.0, 3.0])).tolist() == [5.0]


def test_a_column_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="'values' has 2 entries for 3 tokens"):
        Batch(torch.tensor([0, 3]), {"values": torch.zeros(2)})
    with pytest.raises(ValueError, match="differ in columns"):
        Batch.concat([make([2]), Batch.from_sequences([{"ids": [1]}])])
