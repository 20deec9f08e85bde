"""Every online preset on the demo's task with one setting for all: accuracy on unseen words before and after, over seeds.

Usage: python benchmarks/presets.py [--steps 80] [--seeds 0 1 2] [--jobs 2] [--budget-seconds N] [--out FILE]. Each seed has one
supervised warm start, from which every preset goes on with the same rate, batch and number of steps; only the preset's own fields
differ. Finished runs are kept in FILE, and a call goes on with those that are missing. Prints the table of docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from rlrun.algorithms.presets import PRESETS

ROOT = Path(__file__).parents[1]
ACCURACY = "val-core/unseen/acc/mean@1"


def run(name: str, seed: int, folder: Path, stages: list[dict[str, Any]], model: str) -> list[float]:
    """Train on one core; accuracies of all validations, in order."""
    config = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    config |= {"run": {"name": name, "dir": str(folder), "seed": seed}, "stages": stages, "plugins": ["fsdp"],
               "resources": {"train_ranks": 1, "device": "cpu", "launcher": "local"}, "trainer": {"trackers": []},
               "validation": {"every": 0, "at_start": True}, "checkpoint": {"every": 0, "keep": 1}}
    config["model"]["path"] = model
    if any(stage["algorithm"]["name"] == "ppo" for stage in stages):
        config["critic"] = {"optim": None}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "rlrun", str(path)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row[ACCURACY] for row in rows if ACCURACY in row]


def table(found: dict[str, list[float]], seeds: list[int]) -> str:
    lines = ["| preset | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean rise |", "|---|" + "---|" * (len(seeds) + 1)]
    for name in PRESETS:
        pairs = [found.get(f"{name}-{seed}") for seed in seeds]
        rises = [pair[-1] - pair[0] for pair in pairs if pair]
        cells = [f"{pair[0]:.3f} to {pair[-1]:.3f}" if pair else "" for pair in pairs]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {sum(rises) / len(rises):+.3f} |" if rises else f"| {name} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="begin no run after this time")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "rlrun-presets.json"))
    args = parser.parse_args()
    began = time.monotonic()
    found: dict[str, list[float]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    folder = args.out.parent / "rlrun-presets"
    folder.mkdir(exist_ok=True)
    model = folder / "model"
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, "-m", "rlrun.models.tiny", str(model), "--task", "spell_backward"], check=True)
    warm_stage = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())["stages"][0]

    def one(name: str, seed: int) -> None:
        key = f"{name}-{seed}"
        if key in found or time.monotonic() - began > args.budget_seconds:
            return
        start = folder / f"warm-{seed}" / "checkpoints" / f"step_{warm_stage['steps']:06d}" / "hf"
        stages = [warm_stage] if name == "warm" else [{"algorithm": {"name": name, "prompts_per_step": 64}, "steps": args.steps}]
        found[key] = run(key, seed, folder, stages, str(model if name == "warm" else start))
        args.out.write_text(json.dumps(found))
        print(f"{key}: {found[key]} ({time.monotonic() - began:.0f} s)", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: one("warm", seed), args.seeds))
        list(pool.map(lambda job: one(*job), [(name, seed) for seed in args.seeds for name in PRESETS]))
    print(table(found, args.seeds))


if __name__ == "__main__":
    main()
