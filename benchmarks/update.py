"""The FSDP backend against plain PyTorch, side by side in one run: an update, a log-probability pass, and their memory.

The floor is a bf16 model of transformers whose decoder layers are compiled, on packed rows with torch's varlen_attn, with
fp32 master weights and fused AdamW: what the work costs without sharding, losses, metrics and checks. Several GPUs:
`torchrun --nproc-per-node 2 benchmarks/update.py --only short`. Without a GPU it runs a tiny model, to show that it runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # floor and ours share the device

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlrun.algorithms.losses import PolicyLoss
from rlrun.batch import Batch, micro_batches, shard
from rlrun.config.schema import Config, ModelConfig, OptimConfig
from rlrun.memory import empty_cache
from rlrun.models.log_probs import chosen_log_probs
from rlrun.plugins import Plugins
from rlrun.testing.tiny import build_tokenizer
from rlrun.workers.protocol import RoleRequest, RoleSpec
from rlrun_fsdp.backend import Fsdp
from rlrun_fsdp.plugin import FsdpConfig
from rlrun_fsdp.worker import FsdpWorker

CUDA = torch.cuda.is_available()
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", RANK) if CUDA else torch.device("cpu")
MODEL = {
    "vocab_size": 49_152, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 16_384,
}
if not CUDA:
    MODEL |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
WORK = {  # sequences a rank, prompt tokens from and to, new tokens, tokens of a micro-batch
    "short": (512, (104, 124), 512, 20_480) if CUDA else (16, (10, 14), 16, 128),
    "long": (64, (1024, 1024), 7168, 16_384) if CUDA else (4, (8, 8), 120, 256),
}


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    synchronize()
    began = time.perf_counter()
    yield
    synchronize()
    into.append(time.perf_counter() - began)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()
    dist.barrier()


def peak_gb(run: Callable[[], object]) -> float:
    """Device memory that `run` takes at its peak, beyond what is there when it begins."""
    if not CUDA:
        run()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def make_batch(kind: str, sequences: int | None = None) -> Batch:
    """So many sequences over all ranks; default: what `WORK` says of each."""
    count, (low, high), new, _ = WORK[kind]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(low, high + 1, (sequences or count * RANKS,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), (prompts + new).cumsum(0)])
    total = int(cu_seqlens[-1])
    batch = Batch(cu_seqlens, {"ids": torch.randint(2, int(MODEL["vocab_size"]), (total,), generator=generator)})
    batch.tokens["loss_mask"] = batch.position_ids >= prompts[batch.sequence_ids]
    batch.tokens["advantages"] = torch.randn(len(batch), generator=generator)[batch.sequence_ids]
    return batch


# ---- the floor -------------------------------------------------------------------------------------------------------

def floor_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, row: tuple[Tensor, int],
                    scaling: float, **_: object) -> tuple[Tensor, None]:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not CUDA:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2), None
    extra = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__annotations__ else {}
    cu_seqlens, longest = row
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scaling, window_size=(-1, 0), **extra)[None], None


AttentionInterface.register("floor", floor_attention)


@torch.compile(dynamic=True, disable=not CUDA)
def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


class Floor:
    def __init__(self, path: str) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="floor").to(DEVICE)
        if CUDA:
            for layer in self.model.model.layers:
                layer.forward = torch.compile(layer.forward, dynamic=True)
        self.params = list(self.model.parameters())
        self.masters = [p.detach().float() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, fused=True)

    def rows(self, batch: Batch, tokens: int) -> list[tuple[Tensor, ...]]:
        rows = []
        for part in micro_batches(batch, tokens):
            micro = batch.select(part)
            mask = micro.tokens["loss_mask"].roll(-1).nonzero()[:, 0]
            columns = (micro.tokens["ids"], micro.position_ids, mask, micro.tokens["ids"].roll(-1)[mask],
                       micro.tokens["advantages"].roll(-1)[mask], micro.cu_seqlens.int())
            rows.append(tuple(x.to(DEVICE) for x in columns))
        return rows

    def log_probs(self, row: tuple[Tensor, ...], longest: int) -> Tensor:
        ids, positions, chosen, targets, _, cu_seqlens = row
        hidden = self.model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False,
                                  row=(cu_seqlens, longest)).last_hidden_state[0][chosen]
        head = self.model.lm_head.weight

        def losses(part: Tensor, targets: Tensor) -> Tensor:
            return token_losses(F.linear(part, head), targets)

        return torch.cat([-checkpoint(losses, part, goal, use_reentrant=False)
                          for part, goal in zip(hidden.split(4096), targets.split(4096))])

    def forward(self, rows: list[tuple[Tensor, ...]], longest: int) -> None:
        with torch.no_grad():
            torch.cat([self.log_probs(row, longest) for row in rows]).cpu()

    def update(self, rows: list[tuple[Tensor, ...]], longest: int) -> None:
        for row in rows:
            log_probs = self.log_probs(row, longest)
            (-((log_probs - log_probs.detach()).exp() * row[4]).sum() / 1e5).backward()
        for master, p in zip(self.masters, self.params):
            master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_([p.data for p in self.params], self.masters)


# ---- ours ------------------------------------------------------------------------------------------------------------

def make_worker(path: str, tokens: int, async_save: bool = False) -> FsdpWorker:
    config = Config(model=ModelConfig(path=path))
    config.actor.tokens_per_micro_batch, config.actor.optim = tokens, OptimConfig(lr=1e-6)
    config.checkpoint.async_save = async_save
    config.fsdp = FsdpConfig()  # type: ignore[attr-defined]
    request = RoleRequest(True, path, "bfloat16", optim=config.actor.optim)
    spec = RoleSpec("actor", "fsdp", request, config, Plugins.load(["fsdp"]), RANK, DEVICE, None)
    return FsdpWorker(spec, Fsdp.layout(config, RANKS, 1))


def compare(path: str, kind: str, repeats: int) -> None:
    whole, tokens = make_batch(kind), WORK[kind][3]
    batch, count = whole.select(shard(whole, RANKS)[RANK]), whole.denominators()
    longest = 1 << (int(batch.lengths.max()) - 1).bit_length()
    few = batch.select(range(2 * tokens // longest))
    times: dict[str, list[float]] = {name: [] for name in ("floor update", "our update", "floor forward", "our log-probs")}
    peaks: dict[str, float] = {}
    loss = PolicyLoss(0.2, 0.2, "token_mean")
    floor = Floor(path) if RANKS == 1 else None
    if floor is not None:
        rows, some = floor.rows(batch, tokens), floor.rows(few, tokens)
        for run in (floor.forward, floor.update):
            run(some, longest)
    worker = make_worker(path, tokens)
    began = time.perf_counter()
    worker.forward(few, {"log_probs"}, 1.0)
    worker.update(few, loss, few.denominators(), 1.0)
    synchronize()
    say(f"{kind}: our first small step, with compilation: {time.perf_counter() - began:.1f} s")
    for _ in range(repeats):
        if floor is not None:
            with timed(times["floor update"]):
                peaks["floor"] = peak_gb(lambda: floor.update(rows, longest))
            with timed(times["floor forward"]):
                floor.forward(rows, longest)
        with timed(times["our update"]):
            peaks["ours"] = peak_gb(lambda: worker.update(batch, loss, count, 1.0))
        with timed(times["our log-probs"]):
            worker.forward(batch, {"log_probs"}, 1.0)
        say(f"{kind}: " + ", ".join(f"{name} {seconds[-1]:.3f} s" for name, seconds in times.items() if seconds))
    best = {name: min(seconds) for name, seconds in times.items() if seconds}
    say(f"{kind}: {whole.num_tokens / best['our update']:,.0f} tokens/s in updates, {RANKS} ranks; peak beyond what stays "
        f"(weights, optimizer): {peaks}")
    if floor is not None:
        say(f"{kind}: update {best['our update'] / best['floor update']:.3f} x floor, "
            f"log-probs {best['our log-probs'] / best['floor forward']:.3f} x forward alone")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    say(f"{kind}: graphs compiled so far: {graphs}")
    if RANK == 0 and "PROFILE" in os.environ:
        with torch.profiler.profile() as profile:
            worker.update(batch, loss, count, 1.0)
            synchronize()
        table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=110)
        Path(os.environ["PROFILE"], f"profile_{kind}.txt").write_text(table)


def saving(path: str) -> None:
    """How long a checkpoint of model and optimizer holds up training: written at once, and in the background."""
    worker = make_worker(path, WORK["short"][3], async_save=True)
    contents = ["model", "optimizer", "extra", "hf_model"]
    whole = make_batch("short")
    batch = whole.select(shard(whole, RANKS)[RANK]).select(range(128 if CUDA else 8))
    alone: list[float] = []
    for _ in range(2):
        with timed(alone):
            worker.update(batch, PolicyLoss(0.2, 0.2, "token_mean"), batch.denominators(), 1.0)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        for later in (False, True, True):
            worker.spec.config.checkpoint.async_save = later
            stall: list[float] = []
            beside: list[float] = []
            with timed(stall):
                written = pool.submit(worker.spec.plugins.save_checkpoint(worker, Path(folder, "checkpoint"), contents))
                if not later:
                    written.result()
            began = time.perf_counter()
            updates = 0
            while later and not written.done() and not updates:
                with timed(beside):
                    worker.update(batch, PolicyLoss(0.2, 0.2, "token_mean"), batch.denominators(), 1.0)
                updates += 1
            written.result()
            say(f"checkpoint, {'in the background' if later else 'blocking'}: training waits {stall[0]:.2f} s; written "
                f"{time.perf_counter() - began:.1f} s later; update alone {alone[-1]:.2f} s, beside it "
                f"{beside[0] if beside else 0.0:.2f} s")
            if RANK == 0:
                shutil.rmtree(Path(folder, "checkpoint"))
            dist.barrier()


def log_prob_memory() -> None:
    """Log-probabilities of 8,192 tokens over 150,000 words, with their gradient, against all logits at once."""
    tokens, vocab, width = (8192, 150_000, 1536) if CUDA else (256, 5000, 32)
    dtype = torch.bfloat16 if CUDA else torch.float32
    hidden, weight = (torch.randn(n, width, device=DEVICE, dtype=dtype) for n in (tokens, vocab))
    weight *= width**-0.5
    hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)

    def full() -> Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def chunked() -> Tensor:
        return chosen_log_probs(hidden, weight, None, targets, compiled=CUDA)[0]

    found: dict[str, tuple[list[float], list[float], float, float, Tensor, Tensor]] = {}
    for name, run in (("full logits", full), ("ours", chunked)):
        run().sum().backward()
        forward: list[float] = []
        both: list[float] = []
        for _ in range(5):
            with timed(forward), torch.no_grad():
                run()
            hidden.grad = weight.grad = None
            with timed(both):
                run().sum().backward()
        hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
        with torch.no_grad():
            peak_forward = peak_gb(run)
        peak_both = peak_gb(lambda run=run: run().sum().backward())
        found[name] = forward, both, peak_forward, peak_both, run().detach(), weight.grad.clone()
        say(f"log-probs {tokens} x {vocab}, {name}: forward {min(forward) * 1e3:.1f} ms, {peak_forward:.2f} GB; with backward "
            f"{min(both) * 1e3:.1f} ms, {peak_both:.2f} GB")
    a, b = found["full logits"], found["ours"]
    say(f"log-probs: time {min(b[0]) / min(a[0]):.2f} and {min(b[1]) / min(a[1]):.2f}, memory {b[2] / (a[2] or 1):.3f} and "
        f"{b[3] / (a[3] or 1):.3f} of the full path; largest difference {float((a[4] - b[4]).abs().max()):.1e}, of the weight's "
        f"gradient {float((a[5] - b[5]).float().norm() / a[5].float().norm()):.1e}")


def save_model(path: str) -> None:
    with DEVICE:
        config = AutoConfig.for_model("qwen2", **MODEL, eos_token_id=1, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    say(f"{model.num_parameters() / 1e9:.3f}B parameters")
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["short", "long", "logits", "save"], action="append", help="parts to run; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    parts = args.only or ["logits", "short", "long", "save"]
    if CUDA:
        torch.cuda.set_device(DEVICE)
    store = dist.HashStore() if RANKS == 1 else None
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo", store=store, rank=RANK, world_size=RANKS)
    folder = Path(tempfile.gettempdir(), f"rlrun-benchmark-{MODEL['num_hidden_layers']}")
    if RANK == 0 and not (folder / "config.json").exists():
        save_model(str(folder))
    dist.barrier()
    if "logits" in parts:
        log_prob_memory()
    for kind in ("short", "long"):
        if kind in parts:
            compare(str(folder), kind, args.repeats)
            empty_cache(DEVICE)
    if "save" in parts:
        saving(str(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
