"""How runs on Ray end and go on: failing and hung ranks, signals, kill -9, full disks, many jobs, two nodes, memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import runs
from runs import WITH_POINTS, Leftovers, checkpoints, comparable, grpo, metrics, rl_run, sft, start, wait_for, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROLLOUT = "rlrun.generation:Generator.run"
UPDATE = "rlrun.workers.group:WorkerGroup.update"
PUBLISH = "rlrun.checkpoint:Checkpoints.publish"
RANK_UPDATE = "rlrun_fsdp.worker:FsdpWorker.update"
RANK_SAVE = "rlrun_fsdp.checkpoint:write"
RANK_SAVE_EXTRA = "rlrun_fsdp.checkpoint:_extra"


def since_last_step(run: Path) -> float:
    """Seconds since the run's last metrics."""
    return time.time() - (run / "metrics.jsonl").stat().st_mtime


@pytest.mark.parametrize("what, words", [
    ("raise", ["rank 1 failed in update", "RuntimeError: raised on purpose"]), ("exit", ["rank 1 died in update"])])
def test_failing_rank(tmp_path: Path, model: Path, left: Leftovers, what: str, words: list[str]) -> None:
    """Case 110: rank 1 raises, or its process ends: exit 1 within seconds, its traceback once, nothing left."""
    config = write_run(tmp_path / "a", model, plugins=WITH_POINTS, resources=runs.ray())
    failed = rl_run(config, env={**left.env, "POINTS": f"{RANK_UPDATE}@2/1={what}"}, timeout=240)
    assert since_last_step(config.parent / "run") < 60
    assert failed.returncode == 1, failed.stderr
    for line in words:
        assert failed.stderr.count(line) == 1, failed.stderr
    left.check()


def test_hung_rank(tmp_path: Path, model: Path, left: Leftovers) -> None:
    """Case 110: rank 1 sleeps: after trainer.phase_timeout_s all ranks' stacks are shown and the run ends."""
    config = write_run(tmp_path / "a", model, plugins=WITH_POINTS, resources=runs.ray(), trainer={"phase_timeout_s": 15.0})
    hung = rl_run(config, env={**left.env, "POINTS": f"{RANK_UPDATE}@2/1=sleep"}, timeout=240)
    assert since_last_step(config.parent / "run") < 60
    assert hung.returncode == 1, hung.stderr
    message = hung.stderr.partition("rl-run: ")[2]
    assert "update took longer than trainer.phase_timeout_s = 15 s; waiting for ranks [0, 1]" in message
    rank0, rank1 = message.partition("--- rank 0")[2].split("--- rank 1")
    assert "in stuck_here" in rank1
    assert "in stuck_here" not in rank0
    assert "all_reduce" in rank0 or "in update" in rank0
    left.check()


def two_stages(directory: Path, model: Path) -> Path:
    """2 SFT steps, then 4 of GRPO, a checkpoint after each, on 2 ranks."""
    return write_run(directory, model, sft(2), grpo(4), plugins=WITH_POINTS, checkpoint={"every": 1}, resources=runs.ray())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[dict[str, Any]]:
    """Metrics of the run that nothing stopped."""
    config = two_stages(tmp_path_factory.mktemp("undisturbed") / "a", model)
    done = rl_run(config, timeout=240)
    assert done.returncode == 0, done.stderr
    return comparable(metrics(config.parent / "run"))


def test_killed_and_resumed(tmp_path: Path, model: Path, left: Leftovers, undisturbed: list[dict[str, Any]]) -> None:
    """Case 114: kill -9 of the driver in update, rollout and save, and of rank 1 in update and save: nothing stays after
    20 s; the same command goes on bit for bit. Case 104: the plugin in a file that kills works in the ranks of each restart."""
    config = two_stages(tmp_path / "a", model)
    run = config.parent / "run"
    done = []
    for point, code in ((f"{UPDATE}@2", -9), (f"{ROLLOUT}@1", -9), (f"{PUBLISH}@1", -9), (f"{RANK_UPDATE}@2/1", 1),
                        (f"{RANK_SAVE_EXTRA}@1/1", 1)):
        killed = rl_run(config, env={**left.env, "POINTS": f"{point}=kill"}, timeout=240)
        assert killed.returncode == code, killed.stderr
        left.check(within=20)
        done.append([int(name[-1]) * (-1 if "partial" in name else 1) for name in checkpoints(run)])
    assert done == [[1], [1, 2], [-3, 1, 2], [1, 2, 3], [1, 2, 3]]
    finished = rl_run(config, env=left.env, timeout=240)
    assert finished.returncode == 0, finished.stderr
    assert comparable(metrics(run)) == undisturbed
    left.check()


def test_killed_while_saving_beside_training(tmp_path: Path, left: Leftovers) -> None:
    """kill -9 of a Megatron rank before and after its tensors are written in the background: the checkpoint before stays
    complete, and the same command goes on from it bit for bit, with random states and the schedule."""
    model = runs.write_model(tmp_path / "model", "qwen2", num_key_value_heads=2)
    sections = {"plugins": ["megatron", "./points.py"], "checkpoint": {"every": 1, "async_save": True}, "resources": runs.ray(),
                "actor": {"backend": "megatron", "optim": {"lr": 0.01, "schedule": "linear", "warmup_steps": 1}},
                "megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
    whole, config = (write_run(tmp_path / name, model, grpo(4), **sections) for name in "ab")
    done = rl_run(whole, timeout=400)
    assert done.returncode == 0, done.stderr
    for point in ("rlrun_megatron.checkpoint:write@2/1", "rlrun.workers.saving:export@1"):
        killed = rl_run(config, env={**left.env, "POINTS": f"{point}=kill"}, timeout=400)
        assert killed.returncode == 1, killed.stderr
        left.check(within=20)
        assert [name for name in checkpoints(config.parent / "run") if "partial" not in name] == ["step_000001"]
    finished = rl_run(config, env=left.env, timeout=400)
    assert finished.returncode == 0, finished.stderr
    rows = comparable(metrics(config.parent / "run"))
    assert rows == comparable(metrics(whole.parent / "run"))
    assert len({row["actor/lr"] for row in rows}) == 4
    left.check()


@pytest.mark.parametrize("sent, group", [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)])
def test_stopped_and_resumed(
    tmp_path: Path, model: Path, left: Leftovers, undisturbed: list[dict[str, Any]], sent: signal.Signals, group: bool
) -> None:
    """Case 114: SIGTERM to the driver or to its process group, Ctrl-C three times: codes, nothing left, resumes equal."""
    config = two_stages(tmp_path / "a", model)
    run = config.parent / "run"
    process = start(config, env=left.env)
    wait_for(lambda: (run / "metrics.jsonl").exists() and metrics(run), 240, "first step")
    for _ in range(3 if sent == signal.SIGINT else 1):
        (os.killpg if group else os.kill)(process.pid, sent)
        time.sleep(0.3)
    began = time.monotonic()
    assert process.wait(60) == 128 + sent
    assert time.monotonic() - began < 60
    assert "Traceback" not in (config.parent / "output.txt").read_text()
    left.check()
    assert not [name for name in checkpoints(run) if "partial" in name]
    steps = len(metrics(run))
    assert steps < 6
    if sent == signal.SIGTERM:
        assert checkpoints(run)[-1] == f"step_{steps:06d}"
    finished = rl_run(config, env=left.env, timeout=240)
    assert finished.returncode == 0, finished.stderr
    assert comparable(metrics(run)) == undisturbed


def test_full_disk_on_one_rank(tmp_path: Path, model: Path, left: Leftovers) -> None:
    """A save that fails on rank 1 alone fails on all: the older checkpoints stay, it is counted, and training goes on."""
    config = write_run(tmp_path / "a", model, plugins=WITH_POINTS, checkpoint={"every": 1}, resources=runs.ray())
    done = rl_run(config, env={**left.env, "POINTS": f"{RANK_SAVE}@2/1=full"}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "checkpoint of step 2 failed, training goes on" in done.stderr
    assert checkpoints(config.parent / "run") == ["step_000001", "step_000003", "step_000004"]
    assert [row["checkpoint/failures"] for row in metrics(config.parent / "run")] == [0, 1, 1, 1]
    left.check()


def test_four_jobs_at_once(tmp_path: Path, model: Path, left: Leftovers) -> None:
    """Case 115: four jobs that start together on one machine all start and end well, again and again."""
    for turn in range(3):
        configs = [write_run(tmp_path / f"{turn}-{job}", model, grpo(2), resources=runs.ray(1)) for job in range(4)]
        jobs = [start(config, env=left.env) for config in configs]
        codes = [job.wait(400) for job in jobs]
        assert codes == [0] * 4, [(c.parent / "output.txt").read_text() for c, code in zip(configs, codes) if code]
        left.check()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100_000_000})
    cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def test_two_nodes_train_as_one(
    tmp_path: Path, model: Path, undisturbed: list[dict[str, Any]], two_nodes: str
) -> None:
    """Two Ray nodes, one rank on each: metrics equal those of two ranks on one node. A second run can join as well."""
    config = two_stages(tmp_path / "a", model)
    done = rl_run(config, f"resources.ray_address={two_nodes}", timeout=240)
    assert done.returncode == 0, done.stderr
    assert comparable(metrics(config.parent / "run")) == undisturbed
    again = rl_run(config, f"resources.ray_address={two_nodes}", "run.name=again", timeout=240)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("resources, words", [
    ({"train_ranks": 4}, "4 ranks on cpu need 4 CPU, there are 2"),
    ({"train_ranks": 1, "threads_per_rank": 2}, "no room for 1 ranks of {'CPU': 2.0} within 40 s"),
])
def test_cluster_without_room(tmp_path: Path, model: Path, two_nodes: str, resources: dict[str, int], words: str) -> None:
    """Case 112: a joined cluster is too small, or no node has room: exit 4 within a minute, with asked and available."""
    config = write_run(tmp_path / "a", model, resources={**resources, "launcher": "ray", "ray_address": two_nodes})
    began = time.monotonic()
    refused = rl_run(config, timeout=120)
    assert refused.returncode == 4, refused.stderr
    assert time.monotonic() - began < 60 + 30  # and what it takes to import and to connect
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("launcher, ranks", [("local", 1), ("ray", 2)])
def test_memory_does_not_grow(tmp_path: Path, model: Path, left: Leftovers, launcher: str, ranks: int) -> None:
    """Case 118: over 220 steps the resident memory of driver and ranks grows less than 0.1 MB a step after step 20."""
    config = write_run(tmp_path / "a", model, grpo(220, kl_coef=0.1),
                       resources={"launcher": launcher, "train_ranks": ranks})
    process = start(config, env=left.env)
    sizes = dict(_sizes(process, config.parent / "run", left))
    assert process.returncode == 0, (config.parent / "output.txt").read_text()
    assert len(sizes) == (1 if launcher == "local" else 1 + ranks)
    for name, points in sizes.items():
        steps, sizes_mb = np.array([point for point in points if point[0] > 20]).T
        assert steps[-1] - steps[0] > 150
        slope = float(np.polyfit(steps, sizes_mb, 1)[0])
        print(f"{launcher} {name}: {slope:.4f} MB a step, {sizes_mb[0]:.0f} to {sizes_mb[-1]:.0f} MB")
        assert slope < 0.1, (name, slope)


def _sizes(process: subprocess.Popen[str], run: Path, left: Leftovers) -> dict[str, list[tuple[int, float]]]:
    """(step, resident MB) of the driver and the ranks' processes, as the run goes on."""
    sizes: dict[str, list[tuple[int, float]]] = {}
    watched: dict[str, psutil.Process] = {}
    while process.poll() is None:
        time.sleep(0.5)
        if not (run / "metrics.jsonl").exists():
            continue
        step = len((run / "metrics.jsonl").read_text().splitlines())
        if step and not watched:
            watched = {"driver": psutil.Process(process.pid)}
            watched |= {f"rank {p.pid}": p for p in left.processes() if p.name().startswith("ray::RayRank")}
        for name, one in watched.items():
            try:
                if size := one.memory_info().rss:  # a zombie has none
                    sizes.setdefault(name, []).append((step, size / 1e6))
            except psutil.NoSuchProcess:
                continue
    return sizes
