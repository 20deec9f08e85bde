"""The same numbers as FSDP on one rank, whatever the layout: metrics, columns, gradients, their norm."""

from __future__ import annotations

import pytest

LENGTHS = (5, 9, 3, 7, 6, 9, 2)


@pytest.fixture(scope="module")
def expected(models, ranks1, tools):
    """What FSDP computes of a model, once."""
    found = {}

    def of(kind, head="lm", loss="tokens", updates=1):
        key = kind, head, loss, updates
        if key not in found:
            config = tools.make_config(models[kind], "fsdp")
            found[key] = tools.update(ranks1, config, tools.make_batch(*LENGTHS), head, loss, updates)
        return found[key]

    return of


@pytest.mark.parametrize("kind", ["llama", "qwen2 tied"])
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
    ("qwen2 tied", "dp2"), ("odd", "tp2"), ("odd tied", "tp2"), ("qwen3", "tp2"), ("mistral", "tp2"), ("qwen3", "tp2 sp"),
    ("qwen2 tied", "tp2 sp"), ("llama", "pp2"), ("qwen2 tied", "pp2"), ("deep", "pp2 vpp2"), ("deep tied", "pp2 vpp2"),
    ("llama3 rope", "cp2"), ("mistral", "cp2"), ("moe", "dp2"), ("moe", "ep2"), ("moe", "tp2 sp"), ("moe", "cp2"), ("moe", "pp2"),
]


@pytest.mark.parametrize("kind, layout", CASES)
def test_two_ranks(models, ranks2, tools, expected, kind, layout):
    """Cases 63, 68, 69, 73: the ranks share tokens, weights, layers, heads or experts; micro-batches are uneven."""
    got = tools.update(ranks2, tools.make_config(models[kind], micro=12, **LAYOUTS[layout]), tools.make_batch(*LENGTHS))
    tools.assert_same(got, expected(kind))


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "pp2", "cp2"])
def test_value_model(models, ranks2, tools, expected, layout):
    """A critic's values and gradients, those of its scalar head too."""
    config = tools.make_config(models["llama"], micro=12, **LAYOUTS[layout])
    tools.assert_same(tools.update(ranks2, config, tools.make_batch(*LENGTHS), "value"), expected("llama", "value"))
