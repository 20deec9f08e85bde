"""What holds for every algorithm: its advantages and losses speak of tokens in the loss, whatever the order and the split."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlrun.algorithms.base import Algorithm
from rlrun.batch import Batch
from rlrun.config.schema import AlgorithmConfig, Config, ModelConfig, StageConfig
from rlrun.metrics import Value, results
from rlrun.plugins import Plugins
from rlrun.testing.contracts.base import Contract, configure
from rlrun.testing.fakes import FakeWorkers
from rlrun.testing.updates import random_batch
from rlrun.workers.protocol import RoleRequest, Term

TOLERANCE = 1e-9
KINDS = {"tokens", "sequences", "groups", "gap", "constant", "max"}
ORDER = [5, 2, 0, 3, 7, 1, 6, 4]
PARTS: tuple[list[int], ...] = ([0, 3, 6, 7], [2, 5], [1, 4], [])
"""Micro-batches: whole groups, and nothing, which is what a rank has that others wait for."""


class AlgorithmContract(Contract):
    """The suite for an algorithm that `plugins` provides. Models are stand-ins (`rlrun.testing.fakes.FakeWorkers`)."""

    algorithm: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    """Fields of the stage's `algorithm` section besides the name."""
    per_group: ClassVar[bool] = False
    """Whether the advantages of a prompt's samples depend on its own samples alone; then that is tested. No other test knows
    what advantages ought to be: compare yours with numbers of your own."""

    def make(self) -> Algorithm:
        plugins = Plugins.load(self.plugins)
        options = {"prompts_per_step": 4, **plugins.presets.get(self.algorithm, {}), **self.options}
        stage = StageConfig(AlgorithmConfig(name=self.algorithm, **options), steps=4)
        config = configure(Config(model=ModelConfig(path="nowhere", dtype="float64"), stages=[stage]), plugins, self.sections)
        made: Algorithm = plugins.resolve("algorithm", self.algorithm)(config, stage)
        return made

    def batch(self, fill: float = 0.0) -> Batch:
        """Four prompts with two samples each, interleaved (group 0, 1, 2, 0, 1, 2, 3, 3; reward 1, 0, .5, .25, .75, .25, .5, .5);
        the last sample has no token in the loss. Slots outside the loss are `fill` in every column that an algorithm reads.

        For groups of other sizes make a batch: `Batch.from_sequences([{"ids": [1, 2], "loss_mask": [False, True]}] * 5,
        {"group": ..., "reward": ...})`, and give it to `self.make().estimate(batch, rewards)`."""
        batch = random_batch((5, 9, 6, 7, 6, 9, 4, 2), 2, dtype=torch.float64)
        rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.75, 0.25, 0.5, 0.5], dtype=torch.float64)
        batch.sequences = {
            "group": torch.tensor([0, 1, 2, 0, 1, 2, 3, 3]), "pair": torch.tensor([0, 1, 2, 0, 1, 2, 3, 3]),
            "preference": torch.tensor([0, 0, 0, 1, 1, 1, 0, 1]), "reward": rewards, "correct": rewards.clone(),
            "baseline_reward": rewards.flip(0), "finish_reason": ["stop"] * 8, "data_source": ["test"] * 8,
            "uid": [str(row) for row in range(8)], "policy_version": [0] * 8}
        generator = torch.Generator().manual_seed(1)
        del batch.tokens["advantages"]
        for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "values"):
            column = -1.5 + 0.2 * torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
            batch.tokens[name] = torch.where(batch.tokens["loss_mask"], column, fill)
        return batch

    def scored(self, batch: Batch) -> tuple[Algorithm, Batch, dict[str, float]]:
        """A new algorithm's first look at a batch, as the trainer has it: score, then advantages."""
        algorithm = self.make()
        workers: Any = FakeWorkers(["actor", *algorithm.roles()])
        parts: dict[str, Value] = {**algorithm.score(batch, workers), **algorithm.advantages(batch)}
        assert all(isinstance(value, Value) for value in parts.values()), "metrics travel as rlrun.metrics.Value"
        return algorithm, batch, {k: v for k, v in results(parts).items() if not k.startswith("timing_s/")}

    def test_roles(self) -> None:
        """Further models are requests; what the losses want of the roles that they train is what workers compute."""
        algorithm = self.make()
        roles = {"actor", *algorithm.roles()}
        assert all(isinstance(request, RoleRequest) for request in algorithm.roles().values())
        assert all(request.dtype for request in algorithm.roles().values())
        assert all(want <= {"log_probs", "entropy", "values"} for want in algorithm.wants().values())
        for step in (0, 3):
            assert set(algorithm.losses(step)) <= roles

    def test_selection(self) -> None:
        """One answer a group; looking changes nothing."""
        algorithm, batch = self.make(), self.batch()
        groups = [batch.select(rows) for rows in batch.atoms("group")]
        before = pickle.dumps([(g.tokens, g.sequences) for g in groups])
        chosen = algorithm.select(groups)
        assert [type(one) for one in chosen] == [bool] * len(groups)
        assert pickle.dumps([(g.tokens, g.sequences) for g in groups]) == before
        assert all(isinstance(value, Value) for value in algorithm.drawn(groups).values())

    def test_advantages(self) -> None:
        """Finite where the loss is, also where all rewards of a group are equal; the same whatever stands in slots outside the
        loss, and for every order of samples: groups go by their number, not by position."""
        _, expected, metrics = self.scored(self.batch())
        if not self.make().online:
            return
        mask = expected.tokens["loss_mask"]
        assert expected.tokens["advantages"].shape == mask.shape
        assert torch.isfinite(expected.tokens["advantages"][mask]).all()
        assert expected.tokens["advantages"][mask].any(), "a batch with different rewards teaches something"
        for fill in (float("nan"), 1e6):
            _, other, same = self.scored(self.batch(fill))
            torch.testing.assert_close(other.tokens["advantages"][mask], expected.tokens["advantages"][mask], rtol=0, atol=0)
            assert same == metrics
        _, shuffled, same = self.scored(self.batch().select(ORDER))
        torch.testing.assert_close(shuffled.tokens["advantages"][shuffled.tokens["loss_mask"]],
                                   expected.select(ORDER).tokens["advantages"][shuffled.tokens["loss_mask"]],
                                   rtol=TOLERANCE, atol=TOLERANCE)
        assert same.keys() == metrics.keys()

    def test_groups(self) -> None:
        """Where `per_group` says so: other rewards for one prompt leave the others' advantages alone."""
        if not self.per_group:
            return
        batch = self.batch()
        batch.sequences["reward"][[0, 3]] = torch.tensor([0.0, 3.0], dtype=torch.float64)
        others = (batch.sequences["group"] != 0)[batch.sequence_ids] & batch.tokens["loss_mask"]
        got, expected = (self.scored(b)[1].tokens["advantages"][others] for b in (batch, self.batch()))
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)

    def test_losses(self) -> None:
        """Losses pickle; terms are sums, so that micro-batches add up to the batch; slots outside the loss change neither a term
        nor a gradient, and have none; a batch without a token in the loss gives zeros."""
        algorithm, batch, _ = self.scored(self.batch())
        for role, loss in algorithm.losses(3).items():
            again = pickle.loads(pickle.dumps(loss))
            whole, gradient = self._terms(again, batch, role)
            assert any(term.coef for term in whole.values()), f"nothing of the {role}'s loss is differentiated"
            pieces = [self._terms(loss, batch.select(rows), role)[0] for rows in PARTS]
            for name, term in whole.items():
                if term.kind != "max":
                    total = torch.stack([piece[name].sum.detach() for piece in pieces if name in piece]).sum()
                    torch.testing.assert_close(total, term.sum.detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=name)
            assert torch.isfinite(gradient).all()
            assert not gradient[~batch.tokens["loss_mask"]].any()
            spoiled = batch.select(range(8))
            for name, column in spoiled.tokens.items():
                if column.is_floating_point():
                    spoiled.tokens[name] = torch.where(batch.tokens["loss_mask"], column, float("nan"))
            other, same = self._terms(loss, spoiled, role)
            assert torch.equal(same, gradient)
            assert all(torch.equal(other[name].sum.detach(), term.sum.detach()) for name, term in whole.items())

    def _terms(self, loss: Any, batch: Batch, role: str) -> tuple[dict[str, Term], Tensor]:
        """Terms, and the gradient of the mini-batch's loss with regard to all outputs, added up [T]."""
        workers = FakeWorkers([role])
        outputs = {name: column.requires_grad_() for name, column in
                   workers.outputs(role, batch, {"log_probs", "entropy", "values"}).items()}
        terms: dict[str, Term] = loss(outputs, batch)
        assert all(isinstance(term, Term) and term.sum.dim() == 0 and term.kind in KINDS for term in terms.values())
        parts = [term.sum * term.coef for term in terms.values() if term.coef]
        total = torch.stack([*parts, *(0 * column[:0].sum() for column in outputs.values())]).sum()
        found = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
        return terms, sum((g for g in found if g is not None), torch.zeros(batch.num_tokens, dtype=torch.float64))

    def test_state(self) -> None:
        """What must survive a restart is JSON, and a new object that takes it back goes on alike."""
        algorithm, _, metrics = self.scored(self.batch())
        algorithm.observe({**metrics, "actor/entropy": 0.5})
        state = json.loads(json.dumps(algorithm.state_dict()))
        other = self.make()
        other.load_state_dict(state)
        assert other.state_dict() == algorithm.state_dict()
        first, second = ({role: pickle.dumps(loss) for role, loss in a.losses(3).items()} for a in (algorithm, other))
        assert first == second
