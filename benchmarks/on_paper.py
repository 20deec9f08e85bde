"""Scaling on paper, from one GPU's rates to 1,024 GPUs: bytes on each link, pipeline bubbles, stragglers; and points measured.

Usage: python benchmarks/on_paper.py [--plot SVG] [--measured FILE]. FILE is what benchmarks/scaling.py keeps. Everything that the
curves rest on stands in the constants below; `docs/scaling.md` says why each term is as it is.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
NODE = 8
NVLINK, NETWORK = 0.75 * 450e9, 0.8 * 50e9
"""Bytes/s that a GPU sends inside of a node (NVLink 4) and to another one (400 Gb/s a GPU), with usual efficiencies."""
LATENCY = {True: 20e-6, False: 40e-6}
"""Seconds of a collective that moves nothing, inside of a node or not; per doubling of nodes the second grows by itself / 4."""
SPREAD = 0.01
"""Standard deviation of one rank's seconds for the same work, of their mean (between updates on one GPU: 0.6%)."""
PEAK = 989e12
"""Dense bf16 FLOP/s of an H200."""
TOKENS = 626
"""Of a sequence, as in benchmarks/update.py."""


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    mfu: float  # of an update on one GPU, measured for the smaller model and taken for the larger one
    recomputes: bool
    micro: int  # tokens of a micro-batch
    sequences: int  # of a GPU

    def flops(self, length: float) -> float:
        """Of an update, for each token of a sequence of `length`."""
        return 6 * self.parameters + 6 * self.layers * self.heads * self.head * length

    def seconds(self, tokens: float, length: float = TOKENS) -> float:
        return tokens * self.flops(length) * (4 / 3 if self.recomputes else 1) / (self.mfu * PEAK)

    @property
    def kept(self) -> bool:
        """Whether FSDP keeps parameters and gradients whole from one micro-batch to the next (`fsdp.reshard_after_forward`)."""
        return 6 * self.parameters < 0.25 * 150e9


SMALL = Model("1.4B", 1.386e9, 28, 1536, 12, 2, 128, 0.52, False, 20_480, 256)
LARGE = Model("7B", 7.6e9, 28, 3584, 28, 4, 128, 0.52, True, 8192, 64)


def link(ranks: int) -> float:
    return NVLINK if ranks <= NODE else NETWORK


def wait(ranks: int) -> float:
    """Seconds that a collective over so many ranks takes without data."""
    return LATENCY[ranks <= NODE] * (1 if ranks <= NODE else 1 + math.log2(ranks / NODE) / 4)


def moved(size: float, ranks: int, layers: int) -> float:
    """Seconds of gathering or reducing `size` bytes over `ranks`, a layer at a time."""
    return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / link(ranks) + layers * wait(ranks)


def slowest(ranks: int) -> float:
    """How much longer the slowest of `ranks` takes than the mean: about sqrt(2 ln n) deviations."""
    return 1 + SPREAD * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 1.0


def fsdp(m: Model, gpus: int, sequences: int, shard: int | None = None) -> float:
    """Seconds of an update of `sequences` in all. What is sent hides behind the computation of one micro-batch's forward or
    backward, and no further."""
    shard = min(shard or gpus, gpus)
    compute = m.seconds(math.ceil(sequences / gpus) * TOKENS) * slowest(gpus)
    count = math.ceil(sequences / gpus * TOKENS / m.micro)
    forward, backward = compute / count / 3, compute / count * 2 / 3
    gather, reduce = moved(2 * m.parameters, shard, m.layers), moved(4 * m.parameters, shard, m.layers)
    replicas = gpus // shard
    if replicas > 1:
        reduce += 2 * 4 * m.parameters / shard * (replicas - 1) / replicas / NETWORK + m.layers * wait(gpus)
    if m.kept:
        return compute + max(0.0, gather - forward) + max(0.0, reduce - backward)
    return compute + count * (max(0.0, gather - forward) + max(0.0, gather + reduce - backward))


def megatron(m: Model, gpus: int, tp: int, pp: int) -> float:
    """Seconds of an update of m.sequences a GPU: two all-reduces a layer in forward and backward each, that nothing hides;
    bubbles of (pp - 1) micro-batches; gradients over data-parallel ranks as the distributed optimizer sends them."""
    dp, tokens = gpus // (tp * pp), m.sequences * gpus * TOKENS
    count = math.ceil(tokens / dp / m.micro)
    compute = m.seconds(tokens / gpus) * slowest(gpus)
    # 4 all-reduces of [micro, hidden] in bf16; an all-reduce sends 2 (tp - 1) / tp of its size
    reduced = 4 * m.layers / pp * count * (2 * m.micro * m.hidden * 2 * (tp - 1) / tp / link(tp) + wait(tp)) if tp > 1 else 0.0
    part = m.parameters / (tp * pp)
    grads = moved(4 * part, dp, 1) + moved(2 * part, dp, 1) if dp > 1 else 0.0
    return (compute + reduced) * (1 + (pp - 1) / count) + max(0.0, grads - compute / count)


def ulysses(m: Model, size: int, length: float) -> float:
    """Share of one GPU's tokens/s that `size` ranks keep, each: q, k, v and the output go over the ranks once in forward and
    once in backward (in bf16), and nothing hides that."""
    kv = max(m.kv_heads, size)
    sent = (2 * m.heads + 2 * kv) * m.head * (size - 1) / size * 2 * 2 * m.layers  # bytes a token of this rank
    compute = m.seconds(1, length)
    return compute / (compute + sent / link(size) + 4 * m.layers * wait(size) / (length / size))


def curves(m: Model) -> dict[str, dict[int, float]]:
    """Efficiency by GPUs: tokens/s a GPU, of what one GPU alone would do with any amount of work."""
    alone = m.seconds(m.sequences * TOKENS)
    total = 64 * m.sequences
    found = {"FSDP, the same work a GPU": {n: alone / fsdp(m, n, n * m.sequences) for n in COUNTS},
             "FSDP, sharded in a node": {n: alone / fsdp(m, n, n * m.sequences, NODE) for n in COUNTS},
             f"FSDP, {total:,} sequences in all": {n: m.seconds(total * TOKENS / n) / fsdp(m, n, total)
                                                   for n in COUNTS if n <= total}}
    for tp, pp in ((2, 1), (2, 2), (4, 1)):
        if m.kv_heads % tp == 0:
            found[f"Megatron TP{tp} PP{pp}"] = {n: alone / megatron(m, n, tp, pp) for n in COUNTS if n >= tp * pp}
    return found


def measured(path: Path | None, m: Model) -> dict[int, float]:
    """Points of FSDP with the same work a GPU, of benchmarks/scaling.py's results."""
    results = json.loads(path.read_text()) if path else {}
    rates = {}
    for n in COUNTS:
        result = results.get(f"{m.name.lower()}: FSDP, {n} ranks, {n * m.sequences} sequences", {})
        if "update" in result:
            rates[n] = result["tokens"] / min(result["update"]) / n
    return {n: rate / rates[1] for n, rate in rates.items() if 1 in rates}


def plot(models: list[Model], file: Path | None, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(models), figsize=(10, 4), sharey=True, constrained_layout=True)
    for axis, m in zip(axes, models, strict=True):
        for name, points in curves(m).items():
            axis.plot(*zip(*points.items(), strict=True), label=name)
        points = measured(file, m) or {1: 1.0}
        axis.plot(*zip(*points.items(), strict=True), "ko", label="measured (FSDP, the same work a GPU)")
        axis.set(title=m.name, xlabel="GPUs", xscale="log", ylim=(0, 1.05))
        axis.set_xticks(COUNTS, [str(n) for n in COUNTS], fontsize=7)
    axes[0].set(ylabel="efficiency")
    axes[0].legend(fontsize=7)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--measured", type=Path)
    args = parser.parse_args()
    for m in (SMALL, LARGE):
        print(f"\n| {m.name}: efficiency at | " + " | ".join(f"{n:,}" for n in COUNTS) + " |\n|---|" + "---|" * len(COUNTS))
        found = curves(m) | ({"measured, the same work a GPU": measured(args.measured, m)} if args.measured else {})
        for name, points in found.items():
            print(f"| {name} | " + " | ".join(f"{points[n]:.2f}" if n in points else "" for n in COUNTS) + " |")
    lengths = (32_768, 131_072, 262_144)
    cells = [f"{m.name}, {t:,} tokens" for m in (SMALL, LARGE) for t in lengths]
    print("\n| Ulysses, efficiency at size | " + " | ".join(cells) + " |\n|---|" + "---|" * len(cells))
    for size in (2, 4, 8, 16, 32):
        print(f"| {size} | " + " | ".join(f"{ulysses(m, size, t):.2f}" for m in (SMALL, LARGE) for t in lengths) + " |")
    if args.plot:
        plot([SMALL, LARGE], args.measured, args.plot)


if __name__ == "__main__":
    main()
