"""The kit's plain backend computes what transformers does."""

from __future__ import annotations

import pytest

from rlrun.testing import plain
from rlrun.testing.contracts.backend import LENGTHS, BackendContract, updates


class Plain(BackendContract):
    plugins = [plain.__file__]
    backend = "plain"


@pytest.mark.parametrize("layout, kind", [("one rank", "tokens"), ("two ranks", "groups"), ("two ranks", "sequences")])
def test_update(tmp_path_factory, layout, kind):
    """Columns, terms and gradients, in micro-batches."""
    suite = Plain()
    model, batch = suite.make_model(tmp_path_factory), suite.batch(*LENGTHS)
    suite.expect(suite.drive(suite.config(model, layout), layout, updates, [batch], "lm", kind), model, batch, kind)
    suite.test_layout(model, layout)


def test_the_rest(tmp_path_factory):
    """Ranks without work, clipping and frozen models, on two ranks."""
    suite = Plain()
    model = suite.make_model(tmp_path_factory)
    suite.test_little_to_do(model)
    suite.test_clipping(model)
    suite.test_a_frozen_copy(model)
