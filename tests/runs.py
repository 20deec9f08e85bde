"""Tiny runs of `rl-run` in processes of their own, and what they left: model, questions, configuration, metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

REWARD = '''
def letters(item):
    """A cheap reward that differs between completions: their letters summed up, modulo 7, over 7."""
    return sum(map(ord, item.completion)) % 7 / 7
'''


def write_model(directory: Path, kind: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """A model folder with some ten thousand parameters, and a tokenizer of single characters."""
    from rlrun.models.tiny import save_tiny

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, **sizes}
    save_tiny(directory, kind, seed, **sizes)
    return directory


def write_questions(path: Path, rows: int = 24, first: int = 0) -> Path:
    """A JSONL file of additions of one-digit numbers: prompt "3+4=", answer "7". `first` is the first row's number."""
    pairs = [(n % 10, n // 10 % 10) for n in range(first, first + rows)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))
    return path


def write_run(directory: Path, model: Path, /, *stages: Mapping[str, Any], **sections: Any) -> Path:
    """A configuration `directory`/config.yaml whose run goes to `directory`/run, with questions and a reward beside it.

    `stages`: default is one of 4 GRPO steps, see `grpo`. Each further section is merged into the defaults, such as
    `checkpoint={"every": 1}`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "reward.py").write_text(REWARD)
    config: dict[str, Any] = {
        "plugins": ["fsdp"],
        "run": {"name": "run", "dir": str(directory)},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": [{"kind": "jsonl", "path": str(write_questions(directory / "train.jsonl"))}],
                 "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 4},
        "reward": {"kind": "function", "kwargs": {"path": f"{directory / 'reward.py'}:letters"}},
        "actor": {"optim": {"lr": 1e-2}, "tokens_per_micro_batch": 256},
        "trainer": {"trackers": [], "phase_timeout_s": 120.0},
        "validation": {"at_start": False, "at_end": False},
        "checkpoint": {"every": 0, "keep": None},
        "resources": {"train_ranks": 1, "device": "cpu", "launcher": "local"},
    }
    config = _merged(config, {"stages": list(stages) or [grpo()], **sections})
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def grpo(steps: int = 4, **options: Any) -> dict[str, Any]:
    """A GRPO stage with 4 prompts a step."""
    return {"algorithm": {"name": "grpo", "prompts_per_step": 4, **options}, "steps": steps}


def sft(steps: int = 4, **options: Any) -> dict[str, Any]:
    """A supervised stage with 4 rows a step."""
    return {"algorithm": {"name": "sft", "prompts_per_step": 4, **options}, "steps": steps}


def ray(ranks: int = 2) -> dict[str, Any]:
    """The `resources` of a run on Ray."""
    return {"train_ranks": ranks, "launcher": "ray"}


def rl_run(config: Path, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120,
           ) -> subprocess.CompletedProcess[str]:
    """`rl-run CONFIG ARGUMENTS` in the configuration's folder, to its end."""
    command = [sys.executable, "-m", "rlrun", str(config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=config.parent, env=environment(env))


def start(config: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`rl-run CONFIG ARGUMENTS` in the background, in a process group of its own; its output goes to CONFIG's folder."""
    with (config.parent / "output.txt").open("a") as output:
        command = [sys.executable, "-m", "rlrun", str(config), *arguments]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=config.parent,
                                env=environment(env), start_new_session=True)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with one thread a process, and `extra`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(extra or {})}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, in order."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def comparable(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock and the machine: timings, throughput and memory."""
    clock = ("timing_", "perf/")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]


def checkpoints(run_dir: Path) -> list[str]:
    """Names of what lies in the run's checkpoint folder."""
    folder = run_dir / "checkpoints"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def wait_for(condition: Any, timeout: float, what: str) -> Any:
    """The first true answer of `condition`; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"no {what} within {timeout:g} s"
        time.sleep(0.05)
    return answer


class Leftovers:
    """What runs leave behind: processes, files in /dev/shm, Ray's temporary folders. Compares with the time it was made.

    Processes are known by an environment variable that a run hands down to all that it starts; pass `env` to it.
    """

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self.env = {"RLRUN_TEST_MARK": self.mark}
        self.shared = self._shared()
        self.folders = self._folders()

    def processes(self) -> list[psutil.Process]:
        """Living processes of the runs started with `env`."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("RLRUN_TEST_MARK") == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def check(self, within: float = 20.0, folders: bool = True) -> None:
        """Nothing of those runs is left after at most `within` seconds."""
        wait_for(lambda: not self.processes(), within, f"end of {[p.cmdline() for p in self.processes()]}")
        assert not self._shared() - self.shared
        assert not folders or not self._folders() - self.folders

    @staticmethod
    def _shared() -> set[str]:
        return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()

    @staticmethod
    def _folders() -> set[str]:
        return {p.name for p in Path(tempfile.gettempdir()).glob("rlrun-*")}


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Last resort of a failing test."""
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def _merged(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        nested = isinstance(value, Mapping) and isinstance(base.get(key), Mapping) and key != "kwargs"
        result[key] = _merged(base[key], value) if nested else value
    return result
