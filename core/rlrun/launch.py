"""From a configuration to a trained run: the run folder, the ranks, the data, and an orderly end whatever happens."""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlrun.algorithms.base import Algorithm
from rlrun.checkpoint import Checkpoint, Checkpoints
from rlrun.collector import AheadCollector, AnswerCollector, Collector, RolloutCollector, check_answers
from rlrun.config.load import to_yaml
from rlrun.config.schema import Config, StageConfig
from rlrun.config.validate import validate_resolved
from rlrun.data.prompts import Samples, load_data
from rlrun.data.sampler import Sampler
from rlrun.errors import ConfigError, ExitCode, RankError, RunError
from rlrun.folder import cut_back_to, has_more, locked, resume_point
from rlrun.generation import Generator, make_scorers
from rlrun.models.folder import eos_ids, load_tokenizer
from rlrun.plugins import Plugins
from rlrun.rewards.model import ROLE
from rlrun.trackers.jsonl import Jsonl
from rlrun.trainer import Trainer
from rlrun.workers.group import Ranks, WorkerGroup
from rlrun.workers.protocol import RoleRequest

log = logging.getLogger(__name__)


def run(config: Config, plugins: Plugins, resume: str = "auto") -> int:
    """Train, from the start or from the run folder's last checkpoint. Returns the exit code; errors are raised."""
    with user_errors():
        validate_resolved(config, plugins)
    directory = Path(config.run.dir) / config.run.name
    with locked(directory), signals() as stop:
        with user_errors():
            checkpoint = resume_point(config, directory, resume)
        if checkpoint and checkpoint.state["done"] and not has_more(directory, config):
            print(f"{directory} is done: {checkpoint.step} steps, last checkpoint {checkpoint.path}", file=sys.stderr)
            return ExitCode.OK
        cut_back_to(checkpoint, directory)
        session = Run(config, plugins, directory, checkpoint.step if checkpoint else 0, stop)
        try:
            with user_errors():
                session.start(checkpoint)
            Trainer(session).train(checkpoint)
        finally:
            session.close()
    return ExitCode.OK


@contextmanager
def user_errors() -> Iterator[None]:
    """Until training begins, a ValueError speaks of what the user gave: configuration, data, models."""
    try:
        yield
    except RunError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def signals() -> Iterator[threading.Event]:
    """SIGTERM sets the event, which the trainer looks at. SIGINT interrupts, once: nothing cuts the clean-up short."""
    stop = threading.Event()

    def terminate(number: int, frame: FrameType | None) -> None:
        os.write(2, b"rl-run: SIGTERM, saving and ending\n")  # a handler must not use what it may have interrupted
        stop.set()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handler)
              for number, handler in ((signal.SIGTERM, terminate), (signal.SIGINT, interrupt))}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Run:
    """What a training run has at hand: folder, plugins, ranks, data, rewards, trackers."""

    def __init__(self, config: Config, plugins: Plugins, directory: Path, resumed_step: int, stop: threading.Event) -> None:
        self.config = config
        self.plugins = plugins
        self.directory = directory
        self.resumed_step = resumed_step
        self.stop = stop  # set where the run is to save and end
        self.checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
        self.generator: Generator | None = None
        self.trackers: list[Any] = []
        self._unpublished: tuple[int, set[str]] | None = None  # step and needed checkpoints of one that ranks still write
        self._failed: set[str] = set()
        self._closing = ExitStack()

    def start(self, resumed: Checkpoint | None) -> None:
        """Load the data, start ranks and engines, write down what runs. Raises before any model is loaded where it can."""
        config, plugins = self.config, self.plugins
        self.tokenizer, data, self.sampler = prompts(config, plugins)
        for notice in data.notices:
            log.info("%s", notice)
        self.validation = data.validation
        if resumed:
            self.sampler.load_state_dict(resumed.state["sampler"])
        self.total_steps = sum(self.stage_steps(stage) for stage in config.stages)
        how = plugins.layout(config)
        scorers = make_scorers(config, plugins, self._closing) if generates(config, plugins) else None
        ranks = start_ranks(config, plugins)
        self._closing.callback(ranks.close)
        engine = plugins.resolve("rollout", config.rollout.engine)
        self.workers = WorkerGroup(ranks, how, engine.ranks_per_engine(config))
        if scorers is not None:
            self.workers.start_engines()
            ends = eos_ids(config.model.path, self.tokenizer)
            self.generator = Generator(config, self.workers, self.tokenizer, ends, *scorers)
        (self.directory / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        (self.directory / "plugins.json").write_text(json.dumps(plugins.manifest(), indent=1))
        plugins.copy_files_to(self.directory)
        chosen: list[Any] = [Jsonl, *(plugins.resolve("tracker", name) for name in config.trainer.trackers)]
        for tracker in chosen:
            self.trackers.append(tracker(self.directory, self.total_steps, self.resumed_step))
            self._closing.callback(self._end, self.trackers[-1])

    def reward_roles(self) -> dict[str, RoleRequest]:
        """The role that rewards need besides those of the algorithm."""
        model = self.generator.model if self.generator else None
        return {ROLE: model.request} if model else {}

    def stage_steps(self, stage: StageConfig) -> int:
        return stage_steps(stage, self.sampler)

    def algorithm(self, stage: StageConfig) -> Algorithm:
        return self.plugins.resolve("algorithm", stage.algorithm.name)(self.config, stage)

    def collector(self, stage: StageConfig, algorithm: Algorithm, position: Mapping[str, Any]) -> Collector:
        """The source of a stage's batches; `position` is where an interrupted run's stood in this stage."""
        if algorithm.online:
            assert self.generator is not None
            kind = AheadCollector if self.config.rollout.max_staleness else RolloutCollector
            return kind(self.config, stage, self.sampler, self.generator, algorithm, position)
        return AnswerCollector(stage, self.sampler, self.tokenizer, algorithm)

    def policy_path(self, checkpoint: str | None) -> str:
        """Folder of the policy that a stage begins with."""
        if checkpoint is None:
            return self.config.model.path
        path = self.checkpoints.directory / checkpoint / "hf"
        if not path.is_dir():
            raise RunError(f"{path} is needed by this stage, but was not saved", "add hf_model to checkpoint.save_contents")
        return str(path)

    def save(self, state: Mapping[str, Any], background: bool = False) -> None:
        """Save every trainable role and the trainer's state. In the background, ranks copy their state and go on, and
        `publish` completes the checkpoint. Raises OSError where the disk is full, on whichever rank."""
        assert self._unpublished is None
        contents, step, latest = self.config.checkpoint.save_contents, state["step"], self.checkpoints.latest()
        if latest and latest.step == step:
            return
        with self._writing(step):
            directory = self.checkpoints.begin(step, dict(state))
            for role, request in self.workers.roles.items():
                if request.trainable:
                    parts = contents if role == "actor" else [c for c in contents if c != "hf_model"]
                    self.workers.save(role, directory / role, parts, background)
            self._unpublished = step, {state["stage_start"]}
        if not background:
            self.publish(wait=True)

    def publish(self, wait: bool) -> None:
        """Complete the checkpoint that ranks write, where all have or `wait` is set. Raises OSError like `save`."""
        if self._unpublished and (wait or self.workers.saved()):
            (step, needed), self._unpublished = self._unpublished, None
            with self._writing(step):
                self.workers.finish_saving()
                self.checkpoints.publish(step, needed)

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        try:
            with self.checkpoints.writing(step):
                yield
        except RankError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            raise

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            with self.surviving(f"tracker {type(tracker).__name__}"):
                tracker.log(dict(metrics), step)

    def _end(self, tracker: Any) -> None:
        with self.surviving(f"tracker {type(tracker).__name__}"):
            tracker.close()

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """A full disk costs metrics and dumps, not the run; said once of each."""
        try:
            yield
        except OSError as error:
            if what not in self._failed:
                log.error("%s: cannot write, what it is told is lost while that lasts: %s", what, error)
            self._failed.add(what)

    def phase(self, name: str) -> None:
        """Say what the run is doing now, to trackers that show it."""
        for tracker in self.trackers:
            if hasattr(tracker, "phase"):
                tracker.phase(name)

    def close(self) -> None:
        """End trackers, ranks and scoring processes, whatever of them there is; called on every way out."""
        self._closing.close()


def prompts(config: Config, plugins: Plugins) -> tuple[PreTrainedTokenizerBase, Samples, Sampler]:
    """The tokenizer, all data, and the sampler at its start. Raises ValueError for a row that a stage cannot use."""
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
    data = load_data(config.data, tokenizer, plugins)
    for stage in config.stages:
        algorithm: Algorithm = plugins.resolve("algorithm", stage.algorithm.name)(config, stage)
        if not algorithm.online:
            check_answers(chain(*data.train, data.validation), algorithm, tokenizer, config.actor.tokens_per_micro_batch)
    return tokenizer, data, Sampler(data.train, [s.weight for s in config.data.train], config.run.seed, config.data.shuffle)


def generates(config: Config, plugins: Plugins) -> bool:
    """Whether the run needs an engine: for a stage, or for validation by rewards."""
    online = (plugins.resolve("algorithm", stage.algorithm.name).online for stage in config.stages)
    return any(online) or bool(config.data.validation and config.rewarded)


def stage_steps(stage: StageConfig, sampler: Sampler) -> int:
    """Steps of a stage, also where it is given in epochs. Raises ValueError where one step needs more than all data."""
    by_epochs = sampler.steps(stage.epochs or 1, stage.algorithm.prompts_per_step)
    return by_epochs if stage.steps is None else stage.steps


def start_ranks(config: Config, plugins: Plugins) -> Ranks:
    """Start the ranks, on Ray or here, and connect them."""
    if config.resources.launcher == "local":
        import torch

        from rlrun.workers.local import LocalRanks
        from rlrun.workers.rank import Rank

        wanted = config.resources.device
        device = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
        return LocalRanks(Rank(0, 1, device, config, plugins), config.trainer.phase_timeout_s)
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    from rlrun.workers.ray_ranks import RayRanks

    return RayRanks(config, plugins)
