"""PRIME against outcomes alone (RLOO) on the demo's task: accuracy on unseen words over the steps, and steps to RLOO's last one.

Usage: python benchmarks/prime.py [--steps 160] [--every 20] [--seeds 0 1 2] [--jobs 2] [--out FILE] [--plot SVG] ... Each
seed has one supervised warm start, from which all go on with the same prompts, filter, rates, batches and steps: RLOO is PRIME
whose process rewards weigh nothing. Finished runs are kept in FILE, and a call goes on with those that are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from demo_task import ROOT, Curve, compare, parser

EXAMPLE = ROOT / "examples" / "prime_quickstart.yaml"
ARMS: dict[str, dict[str, Any]] = {
    "rloo": {"process_coef": 0.0, "update": "none", "reference": "policy"},
    "prime": {},
    "prime, process_coef 1": {"process_coef": 1.0},
    "prime, policy as reference": {"reference": "policy"},
}


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


def plot(found: dict[str, Curve], seeds: list[int], path: Path) -> None:
    """Mean of the seeds that all arms have, and each seed thin."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for colour, arm in enumerate(ARMS):
        curves = [found[f"{arm}-{seed}"] for seed in seeds if f"{arm}-{seed}" in found]
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=f"C{colour}", alpha=0.3, linewidth=0.8)
        mean = [(points[0][0], sum(value for _, value in points) / len(points)) for points in zip(*curves, strict=True)]
        axis.plot(*zip(*mean, strict=True), color=f"C{colour}", label=arm)
    axis.set(xlabel="step", ylabel="accuracy on unseen words")
    axis.legend()
    figure.savefig(path)


def main() -> None:
    arguments = parser(__doc__, 160, "rlrun-prime.json")
    arguments.add_argument("--every", type=int, default=20, help="steps between validations")
    arguments.add_argument("--plot", type=Path, help="an SVG to draw")
    args = arguments.parse_args()
    config = yaml.safe_load(EXAMPLE.read_text()) | {"plugins": ["fsdp", "prime"]}
    stage = {**config["stages"][1], "steps": args.steps}
    common = {"stages": [stage], "validation": {"every": args.every, "at_start": True}}
    arms = {arm: {**common, "prime": {**config["prime"], **changed}} for arm, changed in ARMS.items()}
    found = compare(args, config, arms)
    print(table(found, args.seeds))
    if args.plot:
        plot(found, args.seeds, args.plot)


if __name__ == "__main__":
    main()
