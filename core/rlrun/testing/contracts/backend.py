"""What every training backend computes, whatever its ranks and micro-batches: the numbers of transformers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlrun.batch import Batch
from rlrun.config.schema import ActorConfig, Config, ModelConfig, OptimConfig
from rlrun.metrics import Value, results
from rlrun.plugins import Plugins
from rlrun.testing.contracts.base import Contract, configure
from rlrun.testing.gloo import drive
from rlrun.testing.ranks import ranks
from rlrun.testing.tiny import save_tiny
from rlrun.testing.updates import TokenLoss, random_batch
from rlrun.workers.protocol import Kind, RoleRequest

TEMPERATURE = 0.7
KINDS: tuple[Kind, ...] = ("tokens", "sequences", "groups", "constant")
CONTENTS = ["model", "optimizer", "extra"]
LENGTHS = (5, 9, 3, 7, 6, 9, 2)
"""Sequences in which micro-batches of 16 tokens are uneven, and of which the last has no token in the loss."""
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
"""Relative and absolute, of metrics and columns; of gradients and weights by ||a - b|| / ||b||. By `dtype`."""
LIMIT_S = 240.0


@dataclass
class Seen:
    """What shows of some optimizer steps from the weights in the model's folder, or from a checkpoint."""

    metrics: list[dict[str, float]]
    columns: dict[str, Tensor]  # of `forward`, before the first step
    kept: dict[str, Tensor]  # of the last step's own forward
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def reference(path: Path, batch: Batch, dtype: str, kind: Kind) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """Metrics, columns and gradients of `TokenLoss(kind)` by transformers alone, one sequence at a time, in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    columns: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    for row in range(len(batch)):
        ids = batch.select([row]).tokens["ids"]
        log_probs = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        first = log_probs.new_zeros(1)
        columns["log_probs"].append(torch.cat([first, log_probs.gather(1, ids[1:, None])[:, 0]]))
        columns["entropy"].append(torch.cat([first, -(log_probs.exp() * log_probs).sum(-1)]))
    outputs = {name: torch.where(batch.tokens["loss_mask"], torch.cat(parts), 0.0) for name, parts in columns.items()}
    denominators = batch.denominators()
    terms = TokenLoss(kind)(outputs, batch)
    total = torch.stack([t.sum * t.coef / (denominators[t.kind] or 1.0) for t in terms.values() if t.kind != "max"]).sum()
    total.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    metrics = {n: float(t.sum.detach()) / (1.0 if t.kind == "max" else denominators[t.kind]) for n, t in terms.items()
               if t.kind == "max" or denominators[t.kind]}
    return {**metrics, "grad_norm": float(norm)}, {name: column.detach() for name, column in outputs.items()}, gradients


def step_metrics(found: Mapping[str, Value]) -> dict[str, float]:
    """What an update answers; NAME/... is the backend's own, and may differ as it likes."""
    return {name: value for name, value in results(found).items() if "/" not in name}


def updates(workers: Any, plugins: Plugins, config: Config, batches: Sequence[Batch], head: str = "lm",
            kind: Kind = "tokens", load: Path | None = None, save: Path | None = None,
            contents: Sequence[str] = CONTENTS) -> Seen:
    """A step on each batch; runs beside the first rank."""
    want = frozenset({"log_probs", "entropy"} if head == "lm" else {"values"})
    workers.build("actor", RoleRequest(True, config.model.path, config.model.dtype, head), 10, want)  # type: ignore[arg-type]
    if load is not None:
        workers.load("actor", load, CONTENTS)
    before = weights(workers)
    kept: dict[str, Tensor] = {}
    columns = workers.forward("actor", batches[0], want, TEMPERATURE) if batches else {}
    history = [step_metrics(workers.update("actor", batch, TokenLoss(kind), batch.denominators(), TEMPERATURE, keep=kept))
               for batch in batches]
    if save is not None:
        workers.save("actor", save, contents)
    return Seen(history, columns, kept, before, weights(workers))


def weights(workers: Any, role: str = "actor") -> dict[str, Tensor]:
    """A role's weights, which are the same on every rank."""
    first, *others = workers.call("weights", role)
    assert all(same(other, first) for other in others), "ranks send different weights"
    return first


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal names, and every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], x) for name, x in b.items())


def far(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """Names whose ||a - b|| is more than `tolerance` of ||b||, or of 1% of all of them (one that is 0 but for rounding)."""
    assert got.keys() == expected.keys()
    whole = float(torch.stack([x.double().norm() for x in expected.values()]).norm())
    return [name for name, x in expected.items() if (got[name] - x).norm() > tolerance * max(float(x.norm()), 1e-2 * whole)]


class BackendContract(Contract):
    """The suite for a backend that `plugins` provides: forward, update, weights, checkpoints, on one and two CPU ranks (gloo)."""

    backend: ClassVar[str]
    architecture: ClassVar[str] = "gpt2"
    """Of the tiny model, as transformers names it. GPT-2 computes in float64 throughout."""
    sizes: ClassVar[Mapping[str, Any]] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    dtype: ClassVar[str] = "float64"
    layouts: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {"two ranks": {}}
    """Ways to use two ranks, and options that must change no number: sections of the configuration, by a name of yours. The
    first one is used where one is enough."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", ["one rank", *self.layouts])

    @pytest.fixture
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The tiny model's folder, made once a class."""
        cls: Any = type(self)
        if "_model" not in vars(cls):
            cls._model = self.make_model(tmp_path_factory)
        folder: Path = cls._model
        return folder

    def make_model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("model")
        save_tiny(folder, self.architecture, **self.sizes)
        return folder

    def config(self, model: Path, layout: str, micro: int = 16, **optim: Any) -> Config:
        """SGD at rate 1 unless told otherwise, so that weights move by the gradient."""
        assert layout in ("one rank", *self.layouts), f"no layout {layout!r}, but one rank, {', '.join(self.layouts)}"
        optimizer = OptimConfig(**{"name": "sgd", "lr": 1.0, "clip_grad": 0.0, **optim})
        config = Config(model=ModelConfig(path=str(model), dtype=self.dtype),
                        actor=ActorConfig(backend=self.backend, optim=optimizer, tokens_per_micro_batch=micro))
        return configure(config, Plugins.load(self.plugins), self.sections, self.layouts.get(layout, {}))

    def batch(self, *lengths: int, seed: int = 0) -> Batch:
        return random_batch(lengths or LENGTHS, 2, seed, getattr(torch, self.dtype))

    def drive(self, config: Config, layout: str, script: Any, *args: Any) -> Any:
        """`script(workers, plugins, config, *args)` beside the first of the layout's ranks."""
        return drive(ranks(1 if layout == "one rank" else 2), config, script, *args, timeout=LIMIT_S)

    @property
    def two(self) -> str:
        return next(iter(self.layouts))

    def adam(self, model: Path, layout: str) -> Config:
        return self.config(model, layout, name="adamw", lr=0.01, schedule="linear")

    def expect(self, seen: Seen, model: Path, batch: Batch, kind: Kind = "tokens") -> None:
        """What was seen of a step is what transformers computes."""
        tolerance = TOLERANCES[self.dtype]
        metrics, columns, gradients = reference(model, batch, self.dtype, kind)
        got = dict(seen.metrics[-1])
        assert (got.pop("lr"), got.pop("skipped")) == (1.0, 0.0)
        assert got == pytest.approx(metrics, rel=tolerance, abs=tolerance)
        for name, column in columns.items():
            torch.testing.assert_close(seen.columns[name], column, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(seen.kept[name], column, rtol=tolerance, atol=tolerance)
        assert not far({name: seen.before[name] - x for name, x in seen.after.items()}, gradients, tolerance)

    def test_layout(self, model: Path, layout: str) -> None:
        """Every rank works on a shard, every shard has a rank whose answer counts; more parameters take more memory."""
        config, count = self.config(model, layout), 1 if layout == "one rank" else 2
        config.resources.train_ranks = count
        plugins = Plugins.load(self.plugins)
        how = plugins.layout(config)
        assert how.ranks == count
        assert set(how.dp_index) == set(range(how.dp))
        assert [how.dp_index[rank] for rank in how.result_ranks] == list(range(how.dp))
        backend = plugins.resolve("backend", self.backend)
        small, large, frozen = (backend.memory_bytes(config, n, how, trains) for n, trains in (
            (10**6, True), (10**9, True), (10**6, False)))
        assert 0 <= frozen <= small <= large

    def test_forward_and_update(self, model: Path, layout: str) -> None:
        """Columns, terms, the gradient and its norm are those of transformers, for every kind of denominator on one rank and a
        pair of them in each layout; weights are sent under the names of the model's own file, bit for bit."""
        from safetensors.torch import load_file

        batch, number = self.batch(), ["one rank", *self.layouts].index(layout)
        kinds = KINDS[number % 2 :: 2] if number else KINDS

        def script(workers: Any, plugins: Plugins, config: Config) -> list[Seen]:
            return [updates(workers, plugins, config, [batch], kind=kind) for kind in kinds]

        everything = self.drive(self.config(model, layout), layout, script)
        file = load_file(model / "model.safetensors")
        assert same(everything[0].before, {name: x.to(getattr(torch, self.dtype)) for name, x in file.items()})
        for kind, seen in zip(kinds, everything, strict=True):
            self.expect(seen, model, batch, kind)

    def test_little_to_do(self, model: Path) -> None:
        """One sequence for two ranks, one sequence of which no token counts, none that counts at all."""
        for lengths in ((7,), (9, 2), (2, 2)):
            batch = self.batch(*lengths)
            seen = self.drive(self.config(model, self.two), self.two, updates, [batch])
            if any(n > 2 for n in lengths):
                self.expect(seen, model, batch)
        assert seen.metrics[0]["grad_norm"] == 0.0
        assert "loss" not in seen.metrics[0], "a mean of nothing is no number"
        assert same(seen.before, seen.after)

    def test_clipping(self, model: Path) -> None:
        """The norm is that of the whole gradient before it is clipped; the step is the clipped one's."""
        batch, tolerance = self.batch(), TOLERANCES[self.dtype]
        metrics, _, gradients = reference(model, batch, self.dtype, "tokens")
        clip = metrics["grad_norm"] / 2
        seen = self.drive(self.config(model, self.two, clip_grad=clip), self.two, updates, [batch])
        assert seen.metrics[0]["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=tolerance)
        moved = {name: seen.before[name] - x for name, x in seen.after.items()}
        assert not far(moved, {name: g / 2 for name, g in gradients.items()}, tolerance)

    def test_non_finite_gradient(self, model: Path) -> None:
        """NaN in the second of three updates: all ranks skip it, and weights, optimizer and schedule are as if it had never
        been."""
        batch, bad = self.batch(), self.batch()
        bad.tokens["advantages"][bad.cu_seqlens[1] - 1] = float("nan")
        config = self.adam(model, self.two)
        poisoned = self.drive(config, self.two, updates, [batch, bad, batch])
        clean = self.drive(config, self.two, updates, [batch, batch])
        assert [row["skipped"] for row in poisoned.metrics] == [0.0, 1.0, 0.0]
        assert [row["lr"] for row in poisoned.metrics] == pytest.approx([0.009, 0.008, 0.008])
        assert same(poisoned.after, clean.after)

    def test_masked_slots_do_not_matter(self, model: Path) -> None:
        """NaN, infinity and 1e6 in every slot outside the loss: bit-equal metrics and weights."""
        batch = self.batch()

        def script(workers: Any, plugins: Plugins, config: Config) -> list[Seen]:
            found = []
            for fill in (0.0, float("nan"), float("inf"), 1e6):
                for name in ("log_probs", "advantages"):
                    batch.tokens[name] = torch.where(batch.tokens["loss_mask"], batch.tokens[name], fill)
                found.append(updates(workers, plugins, config, [batch]))
            return found

        first, *others = self.drive(self.config(model, self.two), self.two, script)
        for other in others:
            assert other.metrics == first.metrics
            assert same(other.after, first.after)

    def test_first_token_in_the_mask_is_an_error(self, model: Path) -> None:
        """Nothing predicts the first token of a sequence."""
        with pytest.raises(ValueError, match="first token"):
            self.drive(self.config(model, "one rank"), "one rank", updates, [random_batch((5, 3), 0)])

    def test_resume(self, model: Path, tmp_path: Path) -> None:
        """Two updates with AdamW, saved, and two more are, bit for bit, four in a row; also saved before the first. One rank goes
        on from what two saved, with the same numbers, and two from what one saved."""
        batch, config, tolerance = self.batch(), self.adam(model, self.two), TOLERANCES[self.dtype]
        whole = self.drive(config, self.two, updates, [batch] * 4)
        assert whole.metrics[0]["lr"] != whole.metrics[3]["lr"]
        for count in (2, 0):
            folder = tmp_path / str(count)
            first = self.drive(config, self.two, partial(updates, save=folder), [batch] * count)
            second = self.drive(config, self.two, partial(updates, load=folder), [batch] * (4 - count))
            assert first.metrics + second.metrics == whole.metrics
            assert same(first.after, second.before)
            assert same(second.after, whole.after)
        alone = self.drive(self.adam(model, "one rank"), "one rank",
                           partial(updates, load=tmp_path / "2", save=tmp_path / "one"), [batch] * 2)
        for got, expected in zip(alone.metrics, whole.metrics[2:], strict=True):
            assert got == pytest.approx(expected, rel=100 * tolerance, abs=100 * tolerance)  # AdamW's first steps follow signs
        assert same(self.drive(config, self.two, partial(updates, load=tmp_path / "one"), []).before, alone.after)

    def test_saving_beside_training(self, model: Path, tmp_path: Path) -> None:
        """What is written while training goes on is the state of the moment of saving; the export is a model's folder."""
        from transformers import AutoModelForCausalLM

        batch, config = self.batch(), self.adam(model, self.two)
        config.checkpoint.async_save = True

        def script(workers: Any, plugins: Plugins, config: Config) -> tuple[Seen, list[dict[str, float]]]:
            seen = updates(workers, plugins, config, [batch])
            workers.save("actor", tmp_path, [*CONTENTS, "hf_model"], background=True)
            more = [step_metrics(workers.update("actor", batch, TokenLoss(), batch.denominators(), TEMPERATURE))
                    for _ in range(2)]
            workers.finish_saving()
            assert not same(weights(workers), seen.after)
            return seen, more

        seen, more = self.drive(config, self.two, script)
        resumed = self.drive(self.adam(model, self.two), self.two, partial(updates, load=tmp_path), [batch] * 2)
        assert same(resumed.before, seen.after)
        assert resumed.metrics == more
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
        assert all(torch.equal(exported[name], x) for name, x in seen.after.items())

    def test_nowhere_to_write(self, model: Path, tmp_path: Path) -> None:
        """What the disk refuses is an OSError, which the run survives."""
        (tmp_path / "file").touch()
        with pytest.raises(OSError):
            self.drive(self.config(model, self.two), self.two, partial(updates, save=tmp_path / "file" / "saved"), [])

    def test_critic(self, model: Path, tmp_path: Path) -> None:
        """A scalar head learns the same on one rank and on two; checkpoint and export bring it back."""
        batch, tolerance = self.batch(), TOLERANCES[self.dtype]

        def script(workers: Any, plugins: Plugins, config: Config) -> list[Any]:
            seen = updates(workers, plugins, config, [batch], "value", save=tmp_path, contents=["model", "hf_model"])

            def values(path: Path, load: bool) -> Tensor:
                request = RoleRequest(True, str(path), config.model.dtype, "value")
                workers.build("actor", request, 10, frozenset({"values"}))
                if load:
                    workers.load("actor", tmp_path, ["model"])
                column: Tensor = workers.forward("actor", batch, {"values"}, 1.0)["values"]
                return column

            return [seen, values(model, False), values(model, True), values(tmp_path / "hf", False)]

        expected, *_ = self.drive(self.config(model, "one rank"), "one rank", script)
        seen, fresh, resumed, exported = self.drive(self.config(model, self.two), self.two, script)
        assert seen.metrics[0] == pytest.approx(expected.metrics[0], rel=tolerance, abs=tolerance)
        moved, theirs = ({n: s.before[n] - x for n, x in s.after.items()} for s in (seen, expected))
        assert not far(moved, theirs, tolerance)
        assert float((fresh - resumed).abs().max()) > 1e-3
        assert not resumed[~batch.tokens["loss_mask"]].any()
        torch.testing.assert_close(exported, resumed, rtol=tolerance, atol=tolerance)

    def test_a_frozen_copy(self, model: Path) -> None:
        """A reference model is the actor before its first update, exactly: the KL begins at 0. It has no optimizer."""
        batch, want = self.batch(), frozenset({"log_probs"})

        def script(workers: Any, plugins: Plugins, config: Config) -> tuple[Tensor, Tensor]:
            for role in ("actor", "ref"):
                workers.build(role, RoleRequest(role == "actor", config.model.path, config.model.dtype), 10, want)
            mine, theirs = (workers.forward(role, batch, want, TEMPERATURE)["log_probs"] for role in ("actor", "ref"))
            return mine, theirs

        mine, theirs = self.drive(self.config(model, self.two), self.two, script)
        assert float(mine.abs().max()) > 1.0
        assert torch.equal(mine, theirs)
