"""vLLM on the ranks that train, in turn with them, against engines with ranks of their own, one step ahead; and one engine over
two ranks.

The work is that of benchmarks/grpo_step.py, over `--ranks` GPUs, half of which only generate where engines are apart. Each part
runs in a process of its own and its result is kept: called again, the script goes on with those that are missing. Without GPUs
a tiny model shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpo_step
from backends import NO_MULTICAST
from grpo_step import CUDA, FOLDER, arranged

STEPS = 8 if CUDA else 4
GREEDY = (64, 64) if CUDA else (6, 8)
"""Prompts, and tokens to draw for each, where engines of one and of two ranks are compared."""


def together(ranks: int, backend: str) -> dict[str, Any]:
    """Engines beside the trainer on all ranks, one asleep while the other works."""
    return grpo_step.train(arranged("together", backend, ranks, 0, STEPS))


def apart(ranks: int, backend: str) -> dict[str, Any]:
    """Half of the ranks generate the next step's samples while the others train."""
    config = arranged("apart", backend, ranks // 2, ranks - ranks // 2, STEPS)
    config["rollout"] |= {"max_staleness": 1, "engine_args": {"gpu_memory_utilization": 0.85} if CUDA else {}}
    config["stages"][0]["algorithm"]["correction"] = "token_tis"
    return grpo_step.train(config)


def greedy(size: int, backend: str) -> dict[str, Any]:
    """Two ranks with engines of `size` ranks each: greedy completions, seconds of each sync, of falling asleep and waking."""
    from rlrun.config.load import load_config
    from rlrun.config.schema import OptimConfig
    from rlrun.launch import start_ranks
    from rlrun.models.folder import load_tokenizer
    from rlrun.rollout.protocol import Request, SamplingParams
    from rlrun.workers.group import WorkerGroup
    from rlrun.workers.protocol import RoleRequest

    settings = arranged(f"tp{size}", backend, 2, 0, STEPS)
    settings["rollout"]["engine_args"] |= {"tensor_parallel_size": size}
    path = FOLDER / f"tp{size}.json"
    path.write_text(json.dumps(settings))
    config, plugins = load_config(path, [], [])
    tokenizer, (count, new) = load_tokenizer(config.model.path), GREEDY
    requests = [Request(i, tuple(tokenizer(text).input_ids), f"k{i}") for i, text in enumerate(grpo_step.prompts(1, count))]
    ranks = start_ranks(config, plugins)
    try:
        workers = WorkerGroup(ranks, plugins.layout(config), size)
        workers.start_engines()
        workers.build("actor", RoleRequest(True, config.model.path, config.model.dtype, optim=OptimConfig()), 1,
                      frozenset({"log_probs"}))
        found: dict[str, Any] = {"sync and wake": [], "sync": [], "sleep": [], "generate": [], "ids": [], "log_probs": []}

        def timed(what: str, run: Any) -> Any:
            began = time.perf_counter()
            result = run()
            found[what].append(time.perf_counter() - began)
            return result

        for version in (0, 2):
            timed("sync and wake", lambda: workers.sync(version))  # noqa: B023
            timed("sync", lambda: workers.sync(version + 1))  # noqa: B023
            parts = timed("generate", lambda: list(workers.generate(requests, SamplingParams(0.0, new, ()))))
            done = sorted((c for part in parts for c in part), key=lambda c: c.index)
            found["ids"].append([c.ids for c in done])
            found["log_probs"].append([c.log_probs for c in done])
            timed("sleep", workers.sleep)
        return found
    finally:
        ranks.close()


PARTS = {
    "together": (together, 150), "apart": (apart, 150),
    "tp1": (lambda ranks, backend: greedy(1, backend), 90), "tp2": (lambda ranks, backend: greedy(2, backend), 90),
}
"""And seconds that each needs."""


def steps_table(found: dict[str, Any], ranks: int) -> None:
    print("| arrangement | step (s) | tokens/s | tokens/s a GPU | seconds of the phases |\n|---|---|---|---|---|")
    for key, result in found.items():
        rows = list(zip(result["timings"], result["metrics"], strict=True))[2:-1]  # nothing is drawn beside the last step
        split = {name: statistics.median(t[name] for t, _ in rows if name in t) for name in rows[0][0]}
        rate = statistics.median(m["perf/total_num_tokens"] / t["step"] for t, m in rows)
        print(f"| {key} | {split.pop('step'):.2f} | {rate:,.0f} | {rate / ranks:,.0f} | "
              + ", ".join(f"{name} {seconds:.2f}" for name, seconds in split.items()) + " |")
        print(f"{key}, last step: {rows[-1][1]}", file=sys.stderr)


def compare_greedy(one: dict[str, Any], two: dict[str, Any]) -> None:
    """How many greedy sequences of an engine over two ranks are those of an engine on one, and how near the ties are where
    they part: each engine's log-probability of its own choice, after the same tokens."""
    for name, a, b in (("one rank against two", one, two), ("two ranks, before and after sleep", two, two)):
        last = -1 if a is b else 0
        parted = []
        for x, y, p, q in zip(a["ids"][0], b["ids"][last], a["log_probs"][0], b["log_probs"][last], strict=True):
            place = next((i for i, (s, t) in enumerate(zip(x, y)) if s != t), None)
            if place is not None:
                parted.append((place, abs(p[place] - q[place])))
        print(f"{name}: {len(one['ids'][0]) - len(parted)} of {len(one['ids'][0])} greedy sequences are equal; where they part: "
              + (", ".join(f"token {place}, {gap:.4f}" for place, gap in sorted(parted)[:12]) or "nowhere"))
    for name, result in (("one rank", one), ("two ranks", two)):
        print(f"an engine of {name}: " + "; ".join(
            f"{what} " + ", ".join(f"{s:.3f}" for s in seconds) + " s" for what, seconds in result.items()
            if what not in ("ids", "log_probs")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["fsdp", "megatron"], default="fsdp")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to run; default: all. tp2 brings tp1 along")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="start no part that may not end in this time")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "rlrun-async.json"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        Path(os.environ["RESULT"]).write_text(json.dumps(PARTS[args.part][0](args.ranks, args.backend)))
        return
    began = time.monotonic()
    grpo_step.prepare()
    found = json.loads(args.results.read_text()) if args.results.exists() else {}
    wanted = args.only or list(PARTS)
    for name in ["tp1"] * ("tp2" in wanted and "tp1" not in wanted) + wanted:
        key = f"{name}, {args.ranks} ranks, {args.backend}"
        if key in found or time.monotonic() - began + PARTS[name][1] * (CUDA or 0.2) > args.budget_seconds:
            continue
        out = FOLDER / f"{name}-result.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--part", name, "--ranks", str(args.ranks), "--backend", args.backend]
        done = subprocess.run(command, env={**os.environ, **NO_MULTICAST, "RESULT": str(out)}, stdout=sys.stderr)
        if done.returncode:
            print(f"{key}: failed with code {done.returncode}")
            continue
        found[key] = json.loads(out.read_text())
        args.results.write_text(json.dumps(found))
        print(f"{key}: done after {time.monotonic() - began:.0f} s", flush=True)
    steps = {key: result for key, result in found.items() if "timings" in result and f", {args.ranks} ranks" in key}
    if steps:
        steps_table(steps, args.ranks)
    both = [found.get(f"{name}, {args.ranks} ranks, {args.backend}") for name in ("tp1", "tp2")]
    if both[0] and both[1]:
        compare_greedy(both[0], both[1])


if __name__ == "__main__":
    main()
