"""What every plugin that spreads sequences over ranks computes: the numbers of transformers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlrun.plugins import Plugins
from rlrun.testing.contracts.backend import LENGTHS, BackendContract, updates
from rlrun.testing.contracts.base import Contract
from rlrun.testing.ranks import ranks
from rlrun.workers.protocol import RoleRequest, RoleSpec

CASES: Mapping[str, tuple[tuple[int, ...], range | None]] = {
    "padding": (LENGTHS, None), "odd micro-batches": ((8, 2, 1), None), "one long": ((9,), None),
    "on the second rank": ((8,), range(5, 8)), "on the first": ((8,), range(2, 3)), "behind the cut": ((8,), range(4, 5)),
    "nowhere": ((8,), range(0)),
}
"""Lengths of sequences, and the tokens that are in the loss: None: all but first ones."""


class AttentionContract(Contract):
    """The suite for a plugin that answers `patch_attention`, on two CPU ranks (gloo) with a backend of your choice."""

    backend: ClassVar[str]
    """Of the actor; its plugin must be listed in `plugins`, before the one that is tested."""
    spread: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Sections with which two ranks share every sequence: {"ulysses": {"size": 2}}."""
    apart: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Sections with which they do not: {"ulysses": {"size": 1}}."""
    architecture: ClassVar[str] = "gpt2"
    sizes: ClassVar[Mapping[str, Any]] = BackendContract.sizes
    dtype: ClassVar[str] = "float64"

    @property
    def suite(self) -> Any:
        """The backend's suite over two ranks that share every sequence: its checks are used here."""
        given = {name: getattr(self, name) for name in ("plugins", "backend", "architecture", "sizes", "dtype", "sections")}
        return type("Spread", (BackendContract,), {**given, "layouts": {"spread": self.spread}})()

    @pytest.fixture
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The tiny model's folder, made once a class."""
        cls: Any = type(self)
        if "_model" not in vars(cls):
            cls._model = self.suite.make_model(tmp_path_factory)
        folder: Path = cls._model
        return folder

    def test_degree(self, model: Path) -> None:
        """The plugin declares how many ranks share a sequence; the backend makes groups of them."""
        for sections, dp in ((self.spread, 1), (self.apart, 2)):
            config = self.suite.config(model, "spread")
            for name, values in sections.items():
                vars(getattr(config, name)).update(values)
            config.resources.train_ranks = 2
            assert Plugins.load(self.plugins).layout(config).dp == dp

    @pytest.mark.parametrize("case", CASES)
    def test_forward_and_update(self, model: Path, case: str) -> None:
        """Columns, terms, the gradient and its norm are those of transformers: lengths that leave padding, sequences across the
        cut, micro-batches of odd lengths, all loss tokens on one rank, and none at all."""
        lengths, masked = CASES[case]
        batch = self.suite.batch(*lengths)
        batch.tokens["loss_mask"] = batch.position_ids >= 1
        if masked is not None:
            batch.tokens["loss_mask"] = torch.tensor([t in masked for t in range(batch.num_tokens)])
        micro = 8 if case.startswith("odd") else 16
        seen = self.suite.drive(self.suite.config(model, "spread", micro), "spread", updates, [batch])
        if masked is None or len(masked):
            self.suite.expect(seen, model, batch)
        assert (seen.metrics[0]["grad_norm"] > 0) == (masked is None or len(masked) > 0)

    def test_rows(self, model: Path) -> None:
        """A row of any length, cut and put together again, is itself, and its gradient too; parts are equal."""
        config, dtype = self.suite.config(model, "spread"), getattr(torch, self.dtype)
        config.resources.train_ranks = 2
        for size, answers in zip((0, 2), (self._rows(self.apart, config, dtype), self._rows(self.spread, config, dtype))):
            for answer in answers:
                assert (answer is None) == (size == 0), "patch_attention must answer None where no sequence is shared"
                for row, again, gradient, parts in answer or ():
                    assert torch.equal(again, row)
                    assert torch.equal(gradient, torch.ones_like(row))
                    assert len(set(parts)) == 1

    def _rows(self, sections: Mapping[str, Mapping[str, Any]], config: Any, dtype: torch.dtype) -> list[Any]:
        for name, values in sections.items():
            vars(getattr(config, name)).update(values)
        return ranks(2).run(_rows, config, self.backend, dtype)


def _rows(config: Any, backend: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, list[int]]] | None:
    """On every rank: rows of several lengths, what comes back of them, its gradient, and the length of every rank's part."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    from rlrun.models.attention import NAME

    plugins = Plugins.load(config.plugins)
    sp = 2 // plugins.layout(config).dp
    mesh = init_device_mesh("cpu", (2 // sp, sp), mesh_dim_names=("dp", "sp"))
    model = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation=NAME)
    spec = RoleSpec("actor", backend, RoleRequest(True, config.model.path, config.model.dtype), config, plugins, dist.get_rank(),
                    torch.device("cpu"), 1)
    parallel = plugins.patch_attention(model, spec, mesh)
    if parallel is None:
        return None
    assert parallel.size == sp
    found = []
    for total in (1, 2, 7, 16):
        row = torch.arange(total).to(dtype).requires_grad_()
        part = parallel.shard(row)
        again = parallel.gather(part, total)
        again.sum().backward()
        assert row.grad is not None
        dist.all_reduce(row.grad)  # each rank takes its own part of the gradient
        lengths: list[Any] = [None, None]
        dist.all_gather_object(lengths, part.shape[-1])
        found.append((row.detach(), again.detach(), row.grad, lengths))
    return found
