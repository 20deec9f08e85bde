"""Tiny runs of `rl-run` in processes of their own, and what they left: model, questions, configuration, metrics."""

from __future__ import annotations

import contextlib
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

POINTS = '''
import errno, importlib, os, resource, signal, threading, time
from rlrun.hookspecs import PluginInfo, hookimpl

@hookimpl
def plugin_info():
    return PluginInfo("points", 1)

def stuck_here():
    time.sleep(1e6)

def happen(what):
    if what == "raise":
        raise RuntimeError("raised on purpose")
    if what == "exit":
        os._exit(1)
    if what == "sleep":
        stuck_here()
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[what])

def arm(point):
    where, what = point.split("=")
    where, _, condition = where.partition("@")
    nth, _, rank = condition.partition("/")
    module, _, path = where.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), []

    def replacement(*args, **kwargs):
        if rank == "" or args[0].spec.rank == int(rank):
            calls.append(1)
            if len(calls) == int(nth) and what == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                try:
                    return original(*args, **kwargs)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if len(calls) == int(nth):
                happen(what)
        return original(*args, **kwargs)

    setattr(owner, name, replacement)

for point in os.environ.get("POINTS", "").split():
    arm(point)
'''
"""A plugin that makes things happen at chosen points. POINTS in the environment: "module:Class.method@N=WHAT ...", where
WHAT is kill, term, int (signals to the calling process), raise, exit, sleep, or full (no file may grow beyond 4 KiB
during the call); at the N-th call in the process; "@N/R" counts only calls whose first argument is a worker of rank R.
Runs list it with plugins=WITH_POINTS."""
WITH_POINTS = ["fsdp", "./points.py"]

FORKING = '''
import json, os, sys
import torch, transformers, rlrun.launch, rlrun.workers.rank, rlrun.workers.local, rlrun_fsdp.worker, rlrun.rollout.hf
import rlrun.cli, rlrun.algorithms.sft, rlrun.algorithms.policy_gradient
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        sys.argv = ["rl-run", *request["arguments"]]
        rlrun.cli.main()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''

REWARD = '''
def letters(item):
    """A cheap reward that differs between completions: their letters summed up, modulo 7, over 7."""
    return sum(map(ord, item.completion)) % 7 / 7
'''


SESSIONS: set[int] = set()
"""Session ids of the runs that were started."""


def write_model(directory: Path, kind: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """A model folder with some ten thousand parameters, and a tokenizer of single characters."""
    from rlrun.testing.tiny import save_tiny

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
    (directory / "points.py").write_text(POINTS)
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


def rl_run(config: Path, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 240,
           ) -> subprocess.CompletedProcess[str]:
    """`rl-run CONFIG ARGUMENTS` in the configuration's folder, to its end."""
    command = [sys.executable, "-m", "rlrun", str(config), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=config.parent,
                          env=environment(env), start_new_session=True) as process:
        SESSIONS.add(process.pid)
        try:
            output, errors = process.communicate(timeout=timeout)
            return subprocess.CompletedProcess(command, process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def start(config: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`rl-run CONFIG ARGUMENTS` in the background, in a process group of its own; its output goes to CONFIG's folder."""
    with (config.parent / "output.txt").open("a") as output:
        command = [sys.executable, "-m", "rlrun", str(config), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=config.parent,
                                   env=environment(env), start_new_session=True)
        SESSIONS.add(process.pid)
        return process


class Forks:
    """Starts `rl-run` by forking a process that has imported everything: the same, some seconds sooner. One at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=environment())

    def start(self, config: Path, *arguments: str, env: Mapping[str, str] | None = None) -> int:
        """Begin a run; its process id, which leads a process group."""
        assert self.process.stdin
        assert self.process.stdout
        self.output = config.parent / "output.txt"
        request = {"arguments": [str(config), *arguments], "cwd": str(config.parent), "env": dict(env or {}),
                   "output": str(self.output)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())
        SESSIONS.add(self.pid)
        return self.pid

    def wait(self) -> subprocess.CompletedProcess[str]:
        """The run's end: exit code (minus the signal that killed it), and all output as `stderr`."""
        assert self.process.stdout
        code = int(self.process.stdout.readline())
        return subprocess.CompletedProcess([], code, "", self.output.read_text())

    def run(self, config: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        self.start(config, *arguments, env=env)
        return self.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


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

    Processes are known by an environment variable that a run hands down to all that it starts (pass `env` to it), or by
    their session, where they have overwritten their environment.
    """

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self.env = {"RLRUN_TEST_MARK": self.mark}
        self.shared = set(os.listdir("/dev/shm"))
        self.folders = self._folders()

    def processes(self) -> list[psutil.Process]:
        """Living processes of the runs started with `env`."""
        found = []
        for process in psutil.process_iter():
            try:
                known = os.getsid(process.pid) in SESSIONS or process.environ().get("RLRUN_TEST_MARK") == self.mark
                if known and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError):
                continue
        return found

    def check(self, within: float = 20.0) -> None:
        """Nothing of those runs is left after at most `within` seconds."""
        wait_for(lambda: not self.processes(), within, f"end of {self.processes()}")
        wait_for(lambda: not self.shared_files(), within, f"end of {self.shared_files()}")
        wait_for(lambda: not self.new_folders(), within, "end of Ray's folders")

    def shared_files(self) -> set[str]:
        """New files in /dev/shm that no living process has mapped: other programs' files come and go there too."""
        new = {}
        for name in set(os.listdir("/dev/shm")) - self.shared:
            with contextlib.suppress(FileNotFoundError):
                new[os.stat(f"/dev/shm/{name}").st_ino] = name
        for process in psutil.pids() if new else ():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                    _, _, _, _, inode, *path = line.split(maxsplit=5)
                    if path and path[0].startswith("/dev/shm/"):  # a semaphore's file is mapped under an earlier name
                        new.pop(int(inode), None)
        return set(new.values())

    def new_folders(self) -> set[str]:
        """New temporary folders that no living process names in its command line, as those of other runs do."""
        new = self._folders() - self.folders
        for process in psutil.process_iter(["cmdline"]) if new else ():
            command = " ".join(process.info["cmdline"] or ())
            new = {name for name in new if name not in command}
        return new

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
