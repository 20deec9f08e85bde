"""Every online preset on the demo's task with one setting for all: accuracy on unseen words before and after, over seeds.

Usage: python benchmarks/presets.py [--steps 80] [--seeds 0 1 2] [--jobs 2] [--budget-seconds N] [--out FILE]. Each seed has one
supervised warm start, from which every preset goes on with the same rate, batch and number of steps; only the preset's own fields
differ. Finished runs are kept in FILE, and a call goes on with those that are missing. Prints the table of docs/algorithms.md.
"""

from __future__ import annotations

import yaml
from demo_task import ROOT, Curve, compare, parser

from rlrun.algorithms.presets import PRESETS


def table(found: dict[str, Curve], seeds: list[int]) -> str:
    lines = ["| preset | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean rise |", "|---|" + "---|" * (len(seeds) + 1)]
    for name in PRESETS:
        pairs = [found.get(f"{name}-{seed}") for seed in seeds]
        rises = [pair[-1][1] - pair[0][1] for pair in pairs if pair]
        cells = [f"{pair[0][1]:.3f} to {pair[-1][1]:.3f}" if pair else "" for pair in pairs]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {sum(rises) / len(rises):+.3f} |" if rises else f"| {name} |")
    return "\n".join(lines)


def main() -> None:
    args = parser(__doc__, 80, "rlrun-presets.json").parse_args()
    config = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text()) | {
        "plugins": ["fsdp"], "validation": {"every": 0, "at_start": True}}
    arms = {name: {"stages": [{"algorithm": {"name": name, "prompts_per_step": 64}, "steps": args.steps}]} for name in PRESETS}
    print(table(compare(args, config, arms), args.seeds))


if __name__ == "__main__":
    main()
