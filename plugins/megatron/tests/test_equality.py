"""The same numbers as the plain backend on one rank, whatever the layout: metrics, columns, gradients, their norm."""

from __future__ import annotations

import pytest

LENGTHS = (5, 9, 3, 7, 6, 9, 2)


@pytest.fixture(scope="module")
def expected(models, ranks1, tools):
    """What the plain backend computes of a model, once."""
    found = {}

    def of(kind, head="lm", loss="tokens", updates=1):
        key = kind, head, loss, updates
        if key not in found:
            config = tools.make_config(models[kind], "plain")
            found[key] = tools.update(ranks1, config, tools.make_batch(*LENGTHS), head, loss, updates)
        return found[key]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2 tied"])
def test_one_rank(models, ranks1, tools, expected, kind):
    """One rank, one micro-batch and several uneven ones."""
    for micro in (4096, 12):
        got = tools.update(ranks1, tools.make_config(models[kind], micro=micro), tools.make_batch(*LENGTHS))
        tools.assert_same(got, expected(kind))


LAYOUTS = {
    "dp2": {}, "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2 vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
}
CASES = [
    ("odd tied", "tp2 sp"), ("qwen2 tied", "pp2"), ("deep tied", "pp2 vpp2"), ("mistral", "cp2"), ("moe", "ep2"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen2 tied", "dp2"), ("odd", "tp2"), ("odd tied", "tp2"), ("qwen3", "tp2"), ("mistral", "tp2"), ("qwen3", "tp2 sp"),
        ("qwen2 tied", "tp2 sp"), ("llama", "pp2"), ("deep", "pp2 vpp2"), ("llama3 rope", "cp2"), ("moe", "dp2"),
        ("moe", "tp2 sp"), ("moe", "cp2"), ("moe", "pp2"))),
]
FOUR = [
    ("llama", {"tensor_model_parallel_size": 2}), ("odd tied", LAYOUTS["tp2 sp"] | LAYOUTS["pp2"]),
    ("qwen2", LAYOUTS["tp2 sp"] | LAYOUTS["cp2"]), ("deep tied", LAYOUTS["pp2 vpp2"] | LAYOUTS["cp2"]),
    ("moe", LAYOUTS["pp2"] | LAYOUTS["ep2"]), ("moe", LAYOUTS["tp2 sp"] | LAYOUTS["ep2"]),
    ("moe", LAYOUTS["tp2 sp"] | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
    ("moe", LAYOUTS["cp2"] | {"expert_model_parallel_size": 4}),
]


@pytest.mark.parametrize("kind, layout", CASES)
def test_two_ranks(models, ranks2, tools, expected, kind, layout):
    """Cases 63, 68, 69, 73: the ranks share tokens, weights, layers, heads or experts; micro-batches are uneven."""
    got = tools.update(ranks2, tools.make_config(models[kind], micro=12, **LAYOUTS[layout]), tools.make_batch(*LENGTHS))
    tools.assert_same(got, expected(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout", FOUR, ids=str)
def test_four_ranks(models, ranks4, tools, expected, kind, layout):
    """Kinds of parallelism together."""
    got = tools.update(ranks4, tools.make_config(models[kind], micro=12, **layout), tools.make_batch(*LENGTHS))
    tools.assert_same(got, expected(kind))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2 sp", "tp2", "cp2"])
def test_value_model(models, ranks2, tools, expected, layout):
    """A critic's values and gradients, those of its scalar head too."""
    config = tools.make_config(models["llama"], micro=12, **LAYOUTS[layout])
    tools.assert_same(tools.update(ranks2, config, tools.make_batch(*LENGTHS), "value"), expected("llama", "value"))
