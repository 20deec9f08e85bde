"""PRIME against outcomes alone (RLOO) on the demo's task: accuracy on unseen words over the steps, and steps to RLOO's last one.

Usage: python benchmarks/prime.py [--steps 160] [--every 20] [--seeds 0 1 2] [--jobs 2] [--budget-seconds N] [--out FILE]. Each
seed has one supervised warm start, from which all go on with the same prompts, filter, rates, batches and steps: RLOO is PRIME
whose process rewards weigh nothing. Finished runs are kept in FILE, and a call goes on with those that are missing.
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

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "prime_quickstart.yaml"
ACCURACY = "val-core/unseen/acc/mean@1"
ARMS: dict[str, dict[str, Any]] = {
    "rloo": {"process_coef": 0.0, "update": "none", "reference": "policy"},
    "prime": {},
    "prime, policy as reference": {"reference": "policy"},
}
Curve = list[tuple[int, float]]


def run(name: str, seed: int, folder: Path, stages: list[dict[str, Any]], model: str, every: int, prime: dict[str, Any]) -> Curve:
    """Train on one core; accuracy by step."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config |= {"run": {"name": name, "dir": str(folder), "seed": seed}, "stages": stages, "plugins": ["fsdp", "prime"],
               "resources": {"train_ranks": 1, "device": "cpu", "launcher": "local"}, "trainer": {"trackers": []},
               "validation": {"every": every, "at_start": True}, "checkpoint": {"every": 0, "keep": 1}}
    config["model"]["path"] = model
    config["prime"] |= prime
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "rlrun", str(path)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]


def table(found: dict[str, Curve], seeds: list[int]) -> str:
    """Mean accuracy of the seeds that all arms have, by step, and each seed's first step with at least RLOO's last accuracy."""
    whole = [seed for seed in seeds if all(f"{arm}-{seed}" in found for arm in ARMS)]
    if not whole:
        return "no seed is complete"
    steps = [step for step, _ in found[f"rloo-{whole[0]}"]]
    lines = ["| | " + " | ".join(f"step {step}" for step in steps) + " | steps to RLOO's last accuracy, by seed |",
             "|---|" + "---|" * (len(steps) + 1)]
    for arm in ARMS:
        curves = [dict(found[f"{arm}-{seed}"]) for seed in whole]
        last = [found[f"rloo-{seed}"][-1][1] for seed in whole]
        reached = [next((str(step) for step, value in curve.items() if value >= goal), "never")
                   for curve, goal in zip(curves, last, strict=True)]
        means = [sum(curve[step] for curve in curves) / len(curves) for step in steps]
        lines.append(f"| {arm} | " + " | ".join(f"{mean:.3f}" for mean in means) + f" | {', '.join(reached)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=20, help="steps between validations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="begin no run after this time")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "rlrun-prime.json"))
    args = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    folder = args.out.parent / args.out.stem
    folder.mkdir(exist_ok=True)
    model = folder / "model"
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, "-m", "rlrun.models.tiny", str(model), "--task", "spell_backward"], check=True)
    warm, rl = yaml.safe_load(EXAMPLE.read_text())["stages"]

    def one(arm: str, seed: int) -> None:
        key = f"{arm}-{seed}"
        if key in found or time.monotonic() - began > args.budget_seconds:
            return
        if arm == "warm":
            found[key] = run(key, seed, folder, [warm], str(model), 0, {})
        elif f"warm-{seed}" in found:
            start = folder / f"warm-{seed}" / "checkpoints" / f"step_{warm['steps']:06d}" / "hf"
            name = key.replace(",", "").replace(" ", "-")
            found[key] = run(name, seed, folder, [{**rl, "steps": args.steps}], str(start), args.every, ARMS[arm])
        else:
            return
        args.out.write_text(json.dumps(found))
        print(f"{key}: {found[key]} ({time.monotonic() - began:.0f} s)", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: one("warm", seed), args.seeds))
        list(pool.map(lambda job: one(*job), [(arm, seed) for seed in args.seeds for arm in ARMS]))
    print(table(found, args.seeds))


if __name__ == "__main__":
    main()
