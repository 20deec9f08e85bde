"""The training loop: stages of steps, each step from prompts to a new policy."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlrun.batch import Batch, mini_batches
from rlrun.errors import RunError, Terminated
from rlrun.hookspecs import Step
from rlrun.metrics import Value, check_gap, data_metrics, merge, of_role, performance_metrics, results, timing_metrics
from rlrun.validation import validate
from rlrun.workers.profile import profile_of
from rlrun.workers.protocol import RoleRequest

if TYPE_CHECKING:
    from rlrun.algorithms.base import Algorithm
    from rlrun.checkpoint import Checkpoint
    from rlrun.collector import Collector
    from rlrun.config.schema import StageConfig
    from rlrun.launch import Run

log = logging.getLogger(__name__)


class Trainer:
    """Trains the stages of a run on its ranks. State that outlives a step is in `state()` and the roles' checkpoints."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.profile = profile_of(run.config, run.plugins)
        self.step = 0  # steps done, over all stages
        self.stage = 0
        self.stage_step = 0
        self.stage_start: str | None = None
        """Name of the checkpoint that the stage began with; None: the model of the configuration."""
        self.counters = {"checkpoint/failures": 0, "training/skipped_steps": 0, "training/skipped_updates": 0}
        self.skipped_in_a_row: dict[str, int] = {}  # by role
        self.updates = 0  # updates that changed a model in this stage
        self.row: dict[str, float] = {}  # metrics of the last step
        self.timings: dict[str, float] = {}

    def train(self, resumed: Checkpoint | None) -> None:
        """Run all stages to their end, from a checkpoint where there is one."""
        state = resumed.state if resumed else None
        if state:
            self.step, self.stage, self.stage_step = state["step"], state["stage"], state["stage_step"]
            self.stage_start, self.counters = state["stage_start"], {**self.counters, **state["counters"]}
            self.updates, self.row = state["updates"], state["metrics"]
            self.run.track(self.step, self.row)  # once more: the run may have died between checkpoint and metrics
        for index in range(self.stage, len(self.config.stages)):
            if state is None or index > self.stage:
                self.stage, self.stage_step, self.updates, state = index, 0, 0, None
            self._train_stage(self.config.stages[index], state, resumed)
            state, resumed = None, self.run.checkpoints.latest() or resumed

    def _train_stage(self, stage: StageConfig, state: dict[str, Any] | None, start: Checkpoint | None) -> None:
        total = self.total = self.run.stage_steps(stage)
        if self.stage_step >= total:
            return
        algorithm, collector = self._begin(stage, total, state, start)
        if not self.step and self.config.validation.at_start:
            self.run.track(self.step, self._validate(algorithm, collector, force=True))
        while self.stage_step < total:
            self._boundary = self.state(algorithm, collector)
            self._maybe_stop()
            self.timings = {}
            began = time.perf_counter()
            with self.run.workers.traced(self.step + 1, self.profile.traces(self.step + 1)):
                metrics = self._step(stage, algorithm, collector)
            self.step, self.stage_step = self.step + 1, self.stage_step + 1
            last = self.stage_step == total
            self.timings["step"] = time.perf_counter() - began
            validated = self._validate(algorithm, collector, last and self.config.validation.at_end)
            if last and not self.updates:
                raise RunError(f"stage {self.stage} changed no model: in all its steps nothing to train on or no finite gradient")
            every, stop = self.config.checkpoint.every, self.run.stop.is_set()
            self.row = {**metrics, **validated, **self._standing()}
            if last or stop or (every and self.step % every == 0):
                self._save(self.state(algorithm, collector), last, self.config.checkpoint.async_save and not (last or stop))
            with self._saving():
                self.run.publish(wait=False)
            self.run.track(self.step, {**self.row, **self._standing(), **timing_metrics(self.timings)})
            if stop and not (last and self.stage == len(self.config.stages) - 1):
                raise Terminated(f"stopped by a signal after step {self.step}; the same command goes on from there")

    def _begin(
        self, stage: StageConfig, total: int, state: dict[str, Any] | None, start: Checkpoint | None
    ) -> tuple[Algorithm, Collector]:
        """Place the stage's models, and give them their weights: the checkpoint's, or the model's."""
        self.run.workers.sleep()  # the engine's memory is needed for the models
        if state is None:
            self.stage_start = start.path.name if start else None
        algorithm = self.run.algorithm(stage)
        config = self.config
        actor = RoleRequest(True, config.model.path, config.model.dtype, optim=stage.optim or config.actor.optim)
        requests = {"actor": actor, **algorithm.roles(), **self.run.reward_roles()}
        self.run.workers.keep(requests)
        for role, request in requests.items():
            path = request.path or self.run.policy_path(self.stage_start)
            want = algorithm.wants().get(role, frozenset({"log_probs"}))
            steps = sum(role in algorithm.losses(step) for step in range(total)) or total  # a warm-up may leave it out
            each = request.updates_per_step or stage.updates_per_step
            self.run.workers.build(role, replace(request, path=path), steps * each, want)
            if start and state and request.trainable:
                self.run.workers.load(role, start.path / role, config.checkpoint.load_contents)
            elif start and role == "actor":
                self.run.workers.load(role, start.path / role, ["model"])
        if state:
            algorithm.load_state_dict(state["algorithm"])
        return algorithm, self.run.collector(stage, algorithm, state["sampler"] if state else {})

    def _step(self, stage: StageConfig, algorithm: Algorithm, collector: Collector) -> dict[str, float]:
        batch, collected = collector.next(self.step, self._phase, self.stage_step + 1 == self.total)
        with self._phase("sleep"):
            self.run.workers.sleep()
        self._maybe_stop()
        if batch is None:
            return results(self._empty(stage, collected))
        parts = [collected, self._score(stage, algorithm, batch)]
        if not bool(batch.tokens["loss_mask"].any()):
            return results(merge([self._empty(stage, collected), parts[1]]))
        losses = algorithm.losses(self.stage_step)
        for _ in range(stage.algorithm.epochs_per_step):
            for mini in mini_batches(batch, stage.algorithm.prompts_per_update or stage.algorithm.prompts_per_step):
                denominators = mini.denominators()
                if not denominators["tokens"]:  # an optimizer would move the model by its momentum alone
                    continue
                for role, loss in losses.items():
                    with self._phase(f"update_{role}"):
                        update = self.run.workers.update(role, mini, loss, denominators, algorithm.temperature, algorithm.atom)
                    self._count_skips(role, update)
                    parts.append(of_role(role, update))
                batch.tokens.pop("gap_mask", None)  # from the second update on, the trainer's policy has moved
        described = data_metrics(batch, self.config.rollout.max_new_tokens, self.config.data.max_prompt_tokens)
        metrics = results(merge([*parts, self.run.workers.memory(), described]))
        metrics |= performance_metrics(batch, self.timings, self.config.resources.train_ranks)
        metrics |= timing_metrics(self.timings, batch)
        check_gap(metrics, self.config.rollout.gap_limit)
        self._dump(lambda: collector.records(batch), f"step_{self.step + 1:06d}", self.config.trainer.dump_rollouts_every)
        algorithm.observe(metrics)
        extra = self.run.plugins.compute_metrics(Step(self.step + 1, self.stage, self.config, batch, metrics))
        return {**metrics, **extra}

    def _score(self, stage: StageConfig, algorithm: Algorithm, batch: Batch) -> dict[str, Value]:
        """Add every column that the losses read, from reference, critic, old policy and algorithm, in that order."""
        workers = self.run.workers
        old = algorithm.online and (stage.updates_per_step > 1 or algorithm.needs_old_log_probs)
        passes = [("ref", "ref", "log_probs", "ref_log_probs", "ref" in workers.roles),
                  ("values", "critic", "values", "values", "critic" in workers.roles),
                  ("old_log_prob", "actor", "log_probs", "log_probs", old)]
        for phase, role, output, column, needed in passes:
            if needed:
                with self._phase(phase):
                    outputs = workers.forward(role, batch, {output}, algorithm.temperature, algorithm.atom)
                    batch.tokens[column] = outputs[output]
        self._maybe_stop()
        with self._phase("adv"):
            return merge([algorithm.score(batch, workers), algorithm.advantages(batch)])  # in this order

    def _empty(self, stage: StageConfig, collected: dict[str, Value]) -> dict[str, Value]:
        """Nothing to train on in this step: skip and count it, or end the run."""
        o, key = stage.algorithm, f"stages.{self.stage}.algorithm"
        if o.on_empty == "stop":
            raise RunError(f"step {self.step + 1}: after {key}.max_rounds = {o.max_rounds} rounds no sample is left to train on",
                           f"take prompts that are neither always solved nor never, raise max_rounds, or set {key}.on_empty=skip")
        self.counters["training/skipped_steps"] += 1
        log.warning("step %d: nothing to train on, skipped", self.step)
        return collected

    def _validate(self, algorithm: Algorithm, collector: Collector, force: bool) -> dict[str, float]:
        every = self.config.validation.every
        if not self.run.validation or not (force or (every and self.step % every == 0)):
            return {}
        collector.settle()
        with self._phase("testing"):
            metrics, records = validate(self.run, algorithm, self.step)
        self._dump(lambda: records, f"validation_{self.step:06d}", 1)
        return metrics

    def _save(self, state: dict[str, Any], final: bool, background: bool = False) -> None:
        """Save all trainable roles, once what is saved in the background is complete."""
        with self._saving(), self._phase("save_checkpoint"):
            self.run.publish(wait=True)
        with self._saving(final), self._phase("save_checkpoint"):
            self.run.save(state, background)

    @contextmanager
    def _saving(self, final: bool = False) -> Iterator[None]:
        """A full disk is counted and survived, except where the next stage needs the result."""
        try:
            yield
        except OSError as error:
            self.counters["checkpoint/failures"] += 1
            if final:
                raise RunError(f"the last checkpoint of stage {self.stage} could not be written: {error}") from error
            log.error("checkpoint of step %d failed, training goes on: %s", self.step, error)

    def state(self, algorithm: Algorithm, collector: Collector) -> dict[str, Any]:
        """All that the driver must know to go on from here, JSON-able."""
        done = self.stage == len(self.config.stages) - 1 and self.stage_step == self.total
        return {"done": done, "step": self.step, "stage": self.stage, "stage_step": self.stage_step,
                "stage_start": self.stage_start, "updates": self.updates, "counters": dict(self.counters), "metrics": self.row,
                "sampler": collector.position(), "algorithm": algorithm.state_dict()}

    def _standing(self) -> dict[str, float]:
        return {"training/global_step": self.step, "training/stage": self.stage, "training/epoch": self.run.sampler.epoch,
                **self.counters}

    def _maybe_stop(self) -> None:
        """After a signal, end before the step changes any model: state and weights are still those of the last step."""
        if self.run.stop.is_set():
            if self._boundary["step"]:
                self._save(self._boundary, final=False)
            raise Terminated(f"stopped by a signal in step {self.step + 1}; the same command repeats that step")

    def _count_skips(self, role: str, update: dict[str, Value]) -> None:
        skipped = update["skipped"].total > 0
        in_a_row = self.skipped_in_a_row[role] = self.skipped_in_a_row.get(role, 0) + 1 if skipped else 0
        self.counters["training/skipped_updates"] += skipped
        self.updates += not skipped
        if in_a_row >= self.config.trainer.max_skipped_updates:
            with self._saving():
                self.run.publish(wait=True)
            raise RunError(f"{in_a_row} updates of the {role} in a row had a non-finite gradient "
                           "(trainer.max_skipped_updates); the last checkpoint is from before them or unaffected by them")

    def _dump(self, make: Callable[[], Sequence[dict[str, Any]]], name: str, every: int) -> None:
        if every and (every == 1 or (self.step + 1) % every == 0) and (records := make()):
            path = Path(self.run.directory) / "rollouts" / f"{name}.jsonl"
            with self.run.surviving("rollouts"):
                path.parent.mkdir(exist_ok=True)
                path.write_text("".join(json.dumps(record, default=str) + "\n" for record in records))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self.run.phase(name)
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - began
