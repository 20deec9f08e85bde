"""The plugin as the driver sees it."""

from __future__ import annotations

import pytest

from rlrun.errors import ConfigError
from rlrun.plugins import Plugins
from rlrun.workers.group import WorkerGroup

SECOND = '''
from rlrun.hookspecs import PluginInfo, hookimpl

@hookimpl
def plugin_info():
    return PluginInfo("second", 1, sequence_parallel=lambda config: 2)
'''


def test_layout(gpt2, tools):
    """The plugin declares its degree and the backend makes groups of it; sizes that cannot be are refused on the driver."""
    def layout(size, ranks):
        config = tools.make_config(gpt2, size)
        config.resources.train_ranks = ranks
        return Plugins.load(config.plugins).layout(config)

    assert layout(1, 2).dp == 2
    assert (layout(2, 4).dp, layout(2, 4).dp_index, layout(2, 4).result_ranks) == (2, (0, 0, 1, 1), (0, 2))
    with pytest.raises(ValueError, match="multiple of the sequence-parallel size"):
        layout(2, 3)
    with pytest.raises(ValueError, match=r"size = 8 does not fit .*gpt2.* 4 query heads and 4 key-value heads: take 1, 2, 4"):
        layout(8, 8)


def test_two_of_a_kind(gpt2, tools, tmp_path):
    """Only one plugin may spread sequences over ranks."""
    (tmp_path / "second.py").write_text(SECOND)
    config = tools.make_config(gpt2, 1)
    plugins = Plugins.load([*config.plugins, str(tmp_path / "second.py")])
    config.resources.train_ranks = 2
    assert plugins.layout(config).dp == 1
    config.ulysses.size = 2
    with pytest.raises(ConfigError, match=r"ulysses \(2\) and second \(2\)"):
        plugins.layout(config)


def test_every_role_is_checked(gpt2, ranks2, tools, tmp_path):
    """A model that only an algorithm or a reward knows of is refused by its name when it is built."""
    from rlrun.testing.gloo import drive
    from rlrun.testing.tiny import save_tiny
    from rlrun.workers.protocol import RoleRequest

    save_tiny(tmp_path / "odd", "llama", **{**tools.SIZES, "hidden_size": 24}, num_attention_heads=3, num_key_value_heads=3)

    def script(workers, plugins, config):
        workers.build("rm", RoleRequest(False, str(tmp_path / "odd"), "float32"), 1, frozenset({"log_probs"}))

    with pytest.raises(ValueError, match="size = 2 does not fit .*odd with 3 query heads and 3 key-value heads: take 1, 3"):
        drive(ranks2, tools.make_config(gpt2, 2), script)


class Recorded:
    """Four ranks that only note what they are asked."""

    count = 4

    def run(self, method, arguments, first=0):
        self.uids = [batch.tokens["ids"].tolist() for _, batch, *_ in arguments]
        yield from ((rank, ({}, {})) for rank in range(self.count))


def test_who_computes_what(gpt2, tools):
    """Case 58: ranks of one group get the same sequences, groups disjoint ones, and every sequence is somewhere."""
    config = tools.make_config(gpt2, 2)
    config.resources.train_ranks = 4
    ranks, batch = Recorded(), tools.make_batch(5, 9, 3, 7, 6)
    WorkerGroup(ranks, Plugins.load(config.plugins).layout(config)).update("actor", batch, None, {}, 1.0)
    assert ranks.uids[0] == ranks.uids[1]
    assert ranks.uids[2] == ranks.uids[3]
    assert sorted(ranks.uids[0] + ranks.uids[2]) == sorted(batch.tokens["ids"].tolist())
    assert ranks.uids[0] != ranks.uids[2]


def test_refused_before_anything_is_loaded(gpt2, tools):
    """Case 60: an update needs a sample for each shard, not for each rank; what does not fit stops `validate_resolved`."""
    from rlrun.config.schema import DataConfig, SourceConfig, StageConfig
    from rlrun.config.validate import validate_resolved

    config = tools.make_config(gpt2, 2)
    config.resources.train_ranks = 2
    config.data = DataConfig(train=[SourceConfig(kind="jsonl", path="x")])
    config.stages = [StageConfig(steps=1)]
    config.stages[0].algorithm.name, config.stages[0].algorithm.prompts_per_step = "sft", 1
    plugins = Plugins.load(config.plugins)
    validate_resolved(config, plugins)
    config.ulysses.size = 1
    with pytest.raises(ConfigError, match="2 data-parallel shards"):
        validate_resolved(config, plugins)
    config.ulysses.size = config.resources.train_ranks = 8
    with pytest.raises(ValueError, match="4 query heads"):
        validate_resolved(config, plugins)
