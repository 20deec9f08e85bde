"""What comparisons on the demo's task share: a supervised warm start for each seed, runs of one core, results that are kept."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
ACCURACY = "val-core/unseen/acc/mean@1"
Curve = list[tuple[int, float]]
"""Accuracy on unseen words by step."""


def parser(description: str | None, steps: int, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="begin no run after this time")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), out), help="finished runs, to go on from")
    return parser


def run(name: str, seed: int, folder: Path, config: Mapping[str, Any], model: Path) -> Curve:
    name = name.replace(",", "").replace(" ", "-")
    config = {**config, "run": {"name": name, "dir": str(folder), "seed": seed}, "model": {**config["model"], "path": str(model)},
              "resources": {"train_ranks": 1, "device": "cpu", "launcher": "local"}, "trainer": {"trackers": []},
              "checkpoint": {"every": 0, "keep": 1}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "rlrun", str(path)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]


def compare(args: argparse.Namespace, config: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Curve]:
    """Curves by "ARM-SEED". Each seed's warm start is the first of `config`'s stages; an arm goes on from it with its own
    sections in the place of `config`'s."""
    began = time.monotonic()
    found: dict[str, Curve] = json.loads(args.out.read_text()) if args.out.exists() else {}
    folder = args.out.parent / args.out.stem
    folder.mkdir(parents=True, exist_ok=True)
    model, warm = folder / "model", config["stages"][0]
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, "-m", "rlrun.testing.tiny", str(model), "--task", "spell_backward"], check=True)

    def one(name: str, seed: int, sections: Mapping[str, Any], start: Path) -> None:
        key = f"{name}-{seed}"
        if key in found or time.monotonic() - began > args.budget_seconds or not start.exists():
            return
        found[key] = run(key, seed, folder, {**config, **sections}, start)
        args.out.write_text(json.dumps(found))
        print(f"{key}: {found[key]} ({time.monotonic() - began:.0f} s)", flush=True)

    def after(seed: int) -> Path:
        return folder / f"warm-{seed}" / "checkpoints" / f"step_{warm['steps']:06d}" / "hf"

    first = {"stages": [warm], "validation": {"every": 0, "at_start": True}}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: one("warm", seed, first, model), args.seeds))
        list(pool.map(lambda job: one(*job), [(arm, seed, arms[arm], after(seed)) for seed in args.seeds for arm in arms]))
    return found
