"""Sequences over two ranks against sequences on one: the longest row that trains, tokens a second, and what is sent.

On two GPUs: `torchrun --nproc-per-node 2 benchmarks/ulysses.py`. Started alone it starts its own two ranks; without two GPUs they
run a tiny model on the CPU, to show that it runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink's multicast can put GPUs that others share out of service

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlrun.algorithms.losses import PolicyLoss
from rlrun.batch import Batch, shard
from rlrun.config.schema import Config, ModelConfig, OptimConfig
from rlrun.memory import empty_cache
from rlrun.plugins import Plugins
from rlrun.testing.tiny import build_tokenizer
from rlrun.workers.protocol import RoleRequest, RoleSpec, Worker
from rlrun_fsdp.plugin import FsdpConfig
from rlrun_ulysses.plugin import UlyssesConfig

CUDA = torch.cuda.device_count() > 1
RANKS = int(os.environ.get("WORLD_SIZE", "2"))
MODEL = {
    "vocab_size": 49_152, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 1_048_576,
}
if not CUDA:
    MODEL |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PROBES = (16_384, 32_768) if CUDA else (128, 256)
"""Lengths of rows whose memory is measured; it grows in proportion."""
FILL = 0.96
"""Of the memory that CUDA and NCCL leave: what the longest row is to take. The rest is lost between blocks."""


class Measured:
    """A model at one sequence-parallel size on this rank."""

    def __init__(self, path: str, size: int) -> None:
        self.size, self.rank = size, dist.get_rank()
        self.device = torch.device("cuda", self.rank) if CUDA else torch.device("cpu")
        self.config = Config(plugins=["fsdp", "ulysses"], model=ModelConfig(path=path))
        self.config.actor.optim, self.config.resources.train_ranks = OptimConfig(lr=1e-6), RANKS
        self.config.fsdp, self.config.ulysses = FsdpConfig(), UlyssesConfig(size)  # type: ignore[attr-defined]
        plugins = Plugins.load(self.config.plugins)
        self.layout = plugins.layout(self.config)
        request = RoleRequest(True, path, "bfloat16", optim=self.config.actor.optim)
        spec = RoleSpec("actor", "fsdp", request, self.config, plugins, self.rank, self.device, None)
        self.worker: Worker = plugins.make_worker(spec, self.layout)

    def update(self, length: int, rows: int) -> float:
        """Seconds of an update on so many rows of one sequence each, one row a micro-batch."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, int(MODEL["vocab_size"]), (rows * length,), generator=generator)
        whole = Batch(torch.arange(rows + 1) * length, {"ids": ids})
        whole.tokens["loss_mask"] = whole.position_ids >= 1
        whole.tokens["advantages"] = torch.randn(rows * length, generator=generator)
        mine = whole.select(shard(whole, self.layout.dp)[self.layout.dp_index[self.rank]])
        self.config.actor.tokens_per_micro_batch = length
        self.synchronize()
        began = time.perf_counter()
        self.worker.update(mine, PolicyLoss(0.2, 0.2, "token_mean"), whole.denominators(), 1.0)
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        if CUDA:
            torch.cuda.synchronize()
        dist.barrier()

    def peak(self, length: int) -> int:
        """Bytes at most, on any rank, of an update on one row a shard."""
        if not CUDA:
            return 0
        torch.cuda.reset_peak_memory_stats()
        self.update(length, self.layout.dp)
        most = torch.tensor(torch.cuda.max_memory_allocated(), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def longest(self, fill: float = FILL) -> int:
        """Tokens of the longest row that fits, from the memory of two shorter ones; trained once, as proof."""
        self.update(PROBES[0], self.layout.dp)  # compiles
        first, second = (self.peak(length) for length in PROBES)
        if not CUDA:
            return PROBES[-1]
        each = (second - first) / (PROBES[1] - PROBES[0])
        left = torch.tensor(torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device))
        dist.all_reduce(left, dist.ReduceOp.MIN)
        length = int(PROBES[1] + (fill * int(left) - second) / each) // 1024 * 1024
        say(f"size {self.size}: {each / 1e3:.1f} kB a token and rank; trying a row of {length} tokens")
        peak = self.peak(length)
        say(f"size {self.size}: it took {peak / 1e9:.1f} GB, {torch.cuda.max_memory_reserved(self.device) / 1e9:.1f} with gaps")
        return length

    def sent(self, length: int) -> int:
        """Elements that this rank sends to others, in a layer's forward of one row."""
        numbers, swap = [], dist.all_to_all_single

        def counted(received: Tensor, sent: Tensor, **options: Any) -> Any:
            numbers.append(sent.numel() * (self.size - 1) // self.size)
            return swap(received, sent, **options)

        batch = Batch(torch.tensor([0, length]), {"ids": torch.full((length,), 2)})
        batch.tokens["loss_mask"] = batch.position_ids >= 1
        with mock.patch.object(dist, "all_to_all_single", counted):
            self.worker.forward(batch, {"log_probs"}, 1.0)
        return sum(numbers) // int(MODEL["num_hidden_layers"])


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def model_folder() -> str:
    """A random model, written by rank 0 where it is not there yet."""
    folder = Path(tempfile.gettempdir(), f"rlrun-benchmark-ulysses-{MODEL['num_hidden_layers']}-{MODEL['num_attention_heads']}")
    if dist.get_rank() == 0 and not (folder / "tokenizer.json").exists():
        with torch.device("cuda" if CUDA else "cpu"):
            config = AutoConfig.for_model("qwen2", **MODEL, eos_token_id=1, pad_token_id=0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        say(f"{model.num_parameters() / 1e9:.3f}B parameters")
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    dist.barrier()
    return str(folder)


def compare(sizes: Sequence[int], repeats: int, fill: float = FILL) -> dict[int, tuple[int, float, int]]:
    """By size, 1 first: the longest row, tokens/s a rank on rows of the longest of size 1, elements that a rank sends in the
    forward of a layer."""
    path = model_folder()
    found: dict[int, tuple[int, float, int]] = {}
    for size in sizes:
        model = Measured(path, size)
        longest = model.longest(fill)
        length = longest if size == 1 else found[1][0]
        times = [model.update(length, RANKS) for _ in range(repeats)]
        found[size] = longest, length / min(times), model.sent(length)
        say(f"size {size}: longest row {longest:,}; {length / min(times):,.0f} tokens/s a rank in rows of {length:,}; "
            f"{found[size][2]:,} elements sent")
        device = model.device
        del model
        gc.collect()
        empty_cache(device)
    return found


def report(found: dict[int, tuple[int, float, int]]) -> None:
    length, speed, _ = found[1]
    print("| size | longest row (tokens) | tokens/s a rank, rows of size 1's longest | elements sent a rank and layer, forward |")
    print("|---|---|---|---|")
    for size, (longest, rate, sent) in found.items():
        print(f"| {size} | {longest:,} ({longest / length:.2f} x) | {rate:,.0f} ({rate / speed:.3f} x) | {sent:,} |")
        heads, kv_heads = int(MODEL["num_attention_heads"]), max(int(MODEL["num_key_value_heads"]), size)
        width = int(MODEL["hidden_size"]) // heads
        formula = -(-length // size) * (2 * heads + 2 * kv_heads) * width * (size - 1) // size
        assert sent == formula, f"(T/P) (2 Hq + 2 Hkv) D (P-1)/P is {formula}"
    print("elements sent are (T/P) (2 Hq + 2 Hkv) D (P-1)/P, key-value heads counted with their copies", flush=True)


def main(rank: int, port: int | None, repeats: int, fill: float) -> None:
    if port is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    found = compare((1, RANKS), repeats, fill)
    if rank == 0:
        report(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fill", type=float, default=FILL, help="share of the memory that the longest row is to take")
    args = parser.parse_args()
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), None, args.repeats, args.fill)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(main, (port, args.repeats, args.fill), nprocs=RANKS)
