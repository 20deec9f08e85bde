"""The demo with several seeds: accuracy on unseen words before and after RL, and the time it took.

Usage: python benchmarks/demo.py [SEED ...] (default 0 1 2). Runs lie in a temporary folder. `make demo` builds the model first.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACCURACY = "val-core/unseen/acc/mean@1"


def run(seed: int, folder: str) -> tuple[float, float, float]:
    """Accuracy at the end of the warm start, at the end of the run, and seconds."""
    began = time.perf_counter()
    command = [Path(sys.executable).parent / "rl-run", "examples/quickstart.yaml", "-p", "fsdp"]
    subprocess.run([*command, f"run.seed={seed}", f"run.dir={folder}"], cwd=ROOT, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    rows = [json.loads(line) for line in (Path(folder) / f"quickstart-{seed}" / "metrics.jsonl").read_text().splitlines()]
    warm = [row[ACCURACY] for row in rows if row["training/stage"] == 0 and ACCURACY in row]
    final = [row[ACCURACY] for row in rows if ACCURACY in row]
    return warm[-1], final[-1], seconds


def main() -> None:
    seeds = [int(seed) for seed in sys.argv[1:]] or [0, 1, 2]
    print("| seed | after the warm start | after RL | rise | seconds |\n|---|---|---|---|---|")
    rises = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            before, after, seconds = run(seed, folder)
            rises.append(after - before)
            print(f"| {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {seconds:.0f} |", flush=True)
    print(f"mean rise {sum(rises) / len(rises):+.3f}, least {min(rises):+.3f}")


if __name__ == "__main__":
    main()
