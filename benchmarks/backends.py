"""Megatron against FSDP on the same work: updates, log-probability passes, memory, how fast weights leave for the engine, and
whole GRPO steps with vLLM (the work of benchmarks/grpo_step.py).

A random Qwen2-shaped model of 1.4B parameters, the same number of sequences a GPU for each arrangement of ranks; on one GPU also
the compiled floor of benchmarks/update.py. Each arrangement has processes of its own, and its result is kept: called again, the
script goes on with those that are missing. Without a GPU two ranks run a tiny model, to show that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpo_step
import torch
import torch.distributed as dist
import update

from rlrun.algorithms.losses import PolicyLoss
from rlrun.batch import Batch, shard
from rlrun.config.schema import Config, ModelConfig, OptimConfig
from rlrun.plugins import Plugins
from rlrun.workers.protocol import Layout, RoleRequest, RoleSpec, Worker

CUDA = update.CUDA
STEPS = 7
"""Of a run of GRPO; the first two compile."""
SEQUENCES = 256 if CUDA else 16
"""Of each GPU, of about 626 tokens."""
PEAK = 989e12
"""Dense bf16 FLOP/s of an H200."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink's multicast stays off: on a host whose GPUs others share, it can put them out of service."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One arrangement of ranks: the backend ("floor": none), its section, sequences over all ranks, seconds that it may need."""

    name: str
    ranks: int
    backend: str
    section: dict[str, Any] = field(default_factory=dict)
    sequences: int = 0
    checkpointing: bool = False
    seconds: float = 60

    @property
    def key(self) -> str:
        return f"{self.name}, {self.ranks} ranks, {self.sequences} sequences"


def megatron(tp: int = 1, pp: int = 1, sp: bool = False) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": sp}


def jobs(ranks: int) -> list[Job]:
    work = SEQUENCES * ranks
    found = [Job("FSDP", ranks, "fsdp", sequences=work), Job("Megatron TP1", ranks, "megatron", megatron(), work)]
    if ranks == 1:
        return [Job("compiled floor", 1, "floor", sequences=work), *found]
    return [*found, Job("Megatron TP2", ranks, "megatron", megatron(2), work),
            Job("Megatron PP2", ranks, "megatron", megatron(1, 2), work),
            Job("Megatron TP2, sequence parallel", ranks, "megatron", megatron(2, sp=True), work)]


# ---- in each rank ----------------------------------------------------------------------------------------------------

def build(job: Job, path: str) -> tuple[Worker, Layout]:
    config = Config(plugins=[job.backend], model=ModelConfig(path=path, gradient_checkpointing=job.checkpointing))
    config.model.dtype = "bfloat16" if CUDA else "float32"
    config.actor.backend, config.resources.train_ranks = job.backend, job.ranks
    config.actor.tokens_per_micro_batch, config.actor.optim = update.WORK["short"][3], OptimConfig(lr=1e-6)
    plugins = Plugins.load(config.plugins)
    section = next(info for info in plugins.infos if info.name == job.backend).config()  # type: ignore[misc]
    vars(section).update(job.section)
    setattr(config, job.backend, section)
    layout = plugins.layout(config)
    request = RoleRequest(True, path, config.model.dtype, optim=config.actor.optim)
    spec = RoleSpec("actor", job.backend, request, config, plugins, update.RANK, update.DEVICE, None)
    return plugins.make_worker(spec, layout), layout


def flops(batch: Batch) -> float:
    """Of an update's matrix products: 6 for each parameter and token, the output layer's where there is a target only, and
    of causal attention 6 D for each head and pair of a sequence's tokens."""
    m = {name: int(size) for name, size in update.MODEL.items()}
    head = m["hidden_size"] // m["num_attention_heads"]
    attention = 2 * m["hidden_size"] * head * (m["num_attention_heads"] + m["num_key_value_heads"])
    linear = m["num_hidden_layers"] * (attention + 3 * m["hidden_size"] * m["intermediate_size"])
    pairs = float(batch.lengths.double().square().sum())
    output = m["vocab_size"] * m["hidden_size"] * int(batch.tokens["loss_mask"].sum())
    return 6 * (linear * batch.num_tokens + output + m["num_hidden_layers"] * m["hidden_size"] * pairs)


def measure(job: Job, path: str, repeats: int) -> Result:
    """Seconds of an update, a log-probability pass and the weight stream; bytes at the peak of an update, on any rank."""
    whole, tokens = update.make_batch("short", job.sequences), update.WORK["short"][3]
    phases: dict[str, Callable[[], object]]
    if job.backend == "floor":
        floor = update.Floor(path)
        longest = 1 << (int(whole.lengths.max()) - 1).bit_length()
        rows = floor.rows(whole, tokens)
        floor.update(rows[:2], longest)
        phases = {"update": lambda: floor.update(rows, longest), "log_probs": lambda: floor.forward(rows, longest)}
    else:
        worker, layout = build(job, path)
        batch, count = whole.select(shard(whole, layout.dp)[layout.dp_index[update.RANK]]), whole.denominators()
        few = batch.select(range(min(len(batch), 3 * tokens // int(batch.lengths.max()))))
        loss = PolicyLoss(0.2, 0.2, "token_mean")
        worker.update(few, loss, few.denominators(), 1.0)
        phases = {"update": lambda: worker.update(batch, loss, count, 1.0),
                  "log_probs": lambda: worker.forward(batch, {"log_probs"}, 1.0),
                  "weights": lambda: sum(x.numel() for _, x in worker.weights())}
    result: Result = {"tokens": whole.num_tokens, "flops": flops(whole)}
    for name, run in phases.items():
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        seconds: list[float] = []
        for _ in range(repeats):
            with update.timed(seconds):
                run()
        result[name] = seconds
        if name == "update" and CUDA:
            most = torch.tensor(torch.cuda.max_memory_allocated())
            dist.all_reduce(most, dist.ReduceOp.MAX)
            result["peak_gb"] = int(most) / 1e9
    return result


def in_rank(run: Callable[[], Result]) -> None:
    """One of a job's processes. Rank 0 writes the result where the parent looks for it; what does not fit is a result."""
    if CUDA:
        torch.cuda.set_device(update.DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    out = Path(os.environ["RESULT"])
    try:
        result = run()
    except torch.OutOfMemoryError:
        out.write_text(json.dumps({"error": "out of memory"}))
        os._exit(1)  # the others wait for this rank in a collective, and are ended by the launcher
    if update.RANK == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# ---- the parent ------------------------------------------------------------------------------------------------------

def launch(command: Sequence[str], ranks: int, seconds: float) -> Result:
    """Run a script on so many ranks; what its rank 0 wrote. Raises RuntimeError where it fails or takes too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        env = {**os.environ, **NO_MULTICAST, "RESULT": str(out), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
                    "--master-addr", "127.0.0.1", "--master-port", str(port)]
        process = subprocess.Popen([*torchrun, *command], env=env, stdout=sys.stderr)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # which ends its ranks
            process.wait()
            raise RuntimeError(f"took longer than {seconds:.0f} s") from None
        if not out.exists():
            raise RuntimeError(f"ended with code {process.returncode}")
        return json.loads(out.read_text())


def grpo(job: Job, seconds: float) -> Result:
    """`rl-run` with engines beside the ranks that train: seconds and metrics of its steps, memory of the fullest device."""
    grpo_step.prepare()
    config = grpo_step.arranged(f"{job.backend}-{job.ranks}", job.backend, job.ranks, 0, STEPS)
    with tempfile.TemporaryFile("w+") as file, ExitStack() as stack:
        if CUDA:
            ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "100"]
            stack.callback(subprocess.Popen(ask, stdout=file).terminate)
        found = grpo_step.train(config | {job.backend: job.section}, seconds)
        file.seek(0)
        return found | {"device_gb": max((int(line) for line in file if line.strip().isdigit()), default=0) * 2**20 / 1e9}


def run_all(todo: Sequence[tuple[str, float, Callable[[float], Result]]], results: Path, budget: float) -> dict[str, Result]:
    """Results by key of each (key, seconds that it needs, what runs it within a limit), those that were there before too."""
    began = time.monotonic()
    found: dict[str, Result] = json.loads(results.read_text()) if results.exists() else {}
    for key, seconds, run in todo:
        left = budget - (time.monotonic() - began)
        if key in found or left < seconds * (1 if CUDA else 0.2):
            continue
        try:
            found[key] = run(min(left, 3 * seconds))
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"{key}: {error}", flush=True)
            continue
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(found))
        print(f"{key}: {found[key]} ({time.monotonic() - began:.0f} s)", flush=True)
    return found


def row(job: Job, result: Result) -> str:
    """A line of the table: name, ranks, then numbers of `result`."""
    if "error" in result:
        return f"| {job.name} | {job.ranks} | {job.sequences} | {result['error']} | | | | | |"
    best = min(result["update"])
    cells = [f"{best:.2f}", f"{result['tokens'] / best / job.ranks:,.0f}", f"{result['flops'] / best / job.ranks / PEAK:.3f}",
             f"{min(result['log_probs']):.2f}", f"{min(result['weights']):.3f}" if "weights" in result else "",
             f"{result.get('peak_gb', 0):.1f}"]
    return f"| {job.name} | {job.ranks} | {job.sequences} | " + " | ".join(cells) + " |"


HEAD = ("| arrangement | GPUs | sequences | update (s) | tokens/s a GPU | MFU | log-probabilities (s) | weight stream (s) | "
        "peak memory (GB) |\n|---|---|---|---|---|---|---|---|---|")


STEP_HEAD = ("\n| GRPO step with vLLM | GPUs | step (s) | tokens/s a GPU | generation, update, weight sync (s) | "
             "device memory (GB) |\n|---|---|---|---|---|---|")


def step_row(job: Job, result: Result) -> str:
    """Medians of all steps but the first two, which compile."""
    rows = list(zip(result["timings"], result["metrics"], strict=True))[2:]
    middle = {name: statistics.median(timing[name] for timing, _ in rows)
              for name in ("step", "gen", "update_actor", "update_weights")}
    rate = statistics.median(metrics["perf/total_num_tokens"] / timing["step"] for timing, metrics in rows)
    step, *phases = middle.values()
    return (f"| {job.name} | {job.ranks} | {step:.2f} | {rate / job.ranks:,.0f} | " + ", ".join(f"{s:.2f}" for s in phases)
            + f" | {result['device_gb']:.1f} |")


def model_folder(sizes: dict[str, Any]) -> Path:
    """A folder with a random model, written by rank 0 where it is not there."""
    folder = Path(tempfile.gettempdir(), f"rlrun-benchmark-{sizes['num_hidden_layers']}")
    if update.RANK == 0 and not (folder / "tokenizer.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        update.save_model(str(folder))
    dist.barrier()
    return folder


def parser(description: str | None, results: str) -> argparse.ArgumentParser:
    """What scripts of jobs take: repeats, a time limit, the file that keeps results, and the one job of a rank."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="start nothing that may not end in this time")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), results))
    parser.add_argument("--only", default="", help="a part of the names of what is run")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = parser(__doc__, "rlrun-backends.json")
    arguments.add_argument("--ranks", type=int, nargs="+", help="default: one, and two where there are two GPUs")
    args = arguments.parse_args()
    if args.job:
        job = Job(**json.loads(args.job))
        in_rank(lambda: measure(job, str(model_folder(update.MODEL)), args.repeats))
        return
    counts = args.ranks or ([1, 2][:torch.cuda.device_count()] if CUDA else [1, 2])
    every = [job for ranks in counts for job in jobs(ranks)]
    todo = [(job.key, job.seconds, partial(launch, [__file__, "--repeats", str(args.repeats), "--job", json.dumps(asdict(job))],
                                           job.ranks)) for job in every]
    todo += [(f"{job.key}, vLLM", 150, partial(grpo, job)) for job in every if job.backend != "floor"]
    found = run_all([one for one in todo if args.only in one[0]], args.results, args.budget_seconds)
    print(HEAD)
    for job in every:
        if job.key in found:
            print(row(job, found[job.key]))
    print(STEP_HEAD)
    for job in every:
        if (key := f"{job.key}, vLLM") in found:
            print(step_row(job, found[key]))
    one, floor = (next((found.get(job.key, {}) for job in every if job.name == name and job.ranks == 1), {})
                  for name in ("Megatron TP1", "compiled floor"))
    if "update" in one and "update" in floor:
        ratio = min(one["update"]) / min(floor["update"])
        print(f"Megatron TP1's update is {ratio:.3f} x the compiled floor's (at most 1.25 is wanted)")


if __name__ == "__main__":
    main()
