"""A sequence over ranks gives the numbers of a sequence on one rank."""

from __future__ import annotations



def test_update(gpt2, ranks1, ranks2, tools):
    """Case 55: one update, every parameter, in float64; lengths that leave padding, sequences that span the cut."""
    batch = tools.make_batch(5, 9, 3, 7, 6, 9, 2)
    expected = tools.update(ranks1, tools.make_config(gpt2, 1), batch)
    assert expected.metrics["grad_norm"] > 0.1
    tools.assert_same(tools.update(ranks2, tools.make_config(gpt2, 2), batch), expected)
