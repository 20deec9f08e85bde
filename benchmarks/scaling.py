"""More GPUs: FSDP with the same work a GPU and the same work in all, hybrid sharding, Ulysses' longest rows, Megatron's layouts.

`python benchmarks/scaling.py --ranks 8 [--model 7b]`. Models are random; the larger one is made on the devices, without a file.
Each arrangement has processes of its own, and its result is kept: called again, the script goes on with those that are missing.
Without GPUs ranks run a tiny model, to show that it runs. vLLM together with training and apart: benchmarks/async.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import backends
import torch
import torch.distributed as dist
import update
from backends import CUDA, Job, Result, megatron
from torch import Tensor, nn
from transformers import AutoConfig

from rlrun.models.loading import empty_policy
from rlrun.testing.tiny import build_tokenizer

LARGE = {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "tie_word_embeddings": False,
} if CUDA else {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
HEADS = 24 if CUDA else 8
"""Of the smaller model under Ulysses: eight ranks must divide them."""


def scaled(ranks: int, model: str) -> dict[str, list[Job]]:
    """Jobs by table."""
    large = model == "7b"
    each = backends.SEQUENCES // 4 if large else backends.SEQUENCES
    counts = [n for n in (1, 2, 4, 8) if n <= ranks]

    def job(name: str, on: int, backend: str, section: dict[str, Any], sequences: int) -> Job:
        return Job(name, on, backend, section, sequences, large, 120 if large else 60)

    weak = [job("FSDP", n, "fsdp", {}, n * each) for n in counts]
    if ranks >= 4:
        weak.append(job(f"FSDP, 2 x {ranks // 2}", ranks, "fsdp", {"shard_size": ranks // 2}, ranks * each))
    strong = [job("FSDP", n, "fsdp", {}, 2 * each) for n in counts]
    layouts = {"TP2 x PP2": (4, 2, 2), "TP4": (4, 4, 1), "TP2 x DP4": (8, 2, 1), "TP2 x PP2 x DP2": (8, 2, 2)}
    other = [job(f"Megatron {name}", n, "megatron", megatron(tp, pp), n * each) for name, (n, tp, pp) in layouts.items()
             if n <= ranks and sizes(model)["num_key_value_heads"] % tp == 0]
    return {"The same work a GPU": weak, "The same work in all": strong, "Megatron": other}


def sizes(model: str) -> dict[str, Any]:
    return update.MODEL | (LARGE if model == "7b" else {})


# ---- models without files --------------------------------------------------------------------------------------------

def drawn(name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight, the same wherever it is asked for: norms are 1, the rest small."""
    if "norm" in name:
        return torch.ones(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, dtype=dtype, device=device, generator=generator) * 0.02


@contextmanager
def drawn_weights() -> Iterator[None]:
    """While this is entered, backends draw weights on each rank's device where they would read a folder's."""
    import rlrun_fsdp.worker as fsdp
    import rlrun_megatron.weights as mcore

    give_memory = fsdp.materialize

    def materialize(module: nn.Module, device: torch.device) -> None:
        missing = [(name, x.shape) for name, x in module.named_parameters() if x.is_meta]
        rotary = [m for m in module.modules() if any(x.is_meta for x in m.buffers(recurse=False))]
        give_memory(module, device)
        with torch.no_grad(), device:
            for name, shape in missing:
                p = module.get_parameter(name)
                p.copy_(drawn(name, shape, p.dtype, device))
            for m in rotary:
                fresh = type(m)(m.config)  # type: ignore[call-arg]
                for name, x in m.named_buffers(recurse=False):
                    x.copy_(fresh.get_buffer(name))

    class Files:
        def __init__(self, *_: Any) -> None:
            self.tensors: dict[str, Any] = {}

        def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
            local = [len(range(size)[cut]) for size, cut in zip(shape, (*part, *[slice(None)] * (len(shape) - len(part))))]
            return drawn(f"{name} {part}", tuple(local), torch.float32, update.DEVICE)

    with ExitStack() as stack:
        for place, what, value in [
            (fsdp, "load_first", lambda spec, stored: empty_policy(spec.request.path, spec.request.head, stored)),
            (fsdp, "fill", lambda model, whole, device: None), (fsdp, "materialize", materialize), (mcore, "Files", Files),
        ]:
            stack.enter_context(mock.patch.object(place, what, value))
        yield


def measure_large(job: Job, repeats: int) -> Result:
    """See `backends.measure`; the folder has all but weights."""
    update.MODEL |= LARGE
    if CUDA:
        update.WORK["short"] = (*update.WORK["short"][:3], 8192)
    folder = Path(tempfile.gettempdir(), "rlrun-benchmark-large")
    if update.RANK == 0:
        AutoConfig.for_model("qwen2", **update.MODEL, eos_token_id=1, pad_token_id=0).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    dist.barrier()
    with drawn_weights():
        return backends.measure(job, str(folder), repeats)


def measure_ulysses(ranks: int, repeats: int) -> Result:
    import ulysses

    ulysses.MODEL |= {"num_attention_heads": HEADS}
    found = ulysses.compare([n for n in (1, 2, 4, 8) if n <= ranks], repeats)
    if update.RANK == 0:
        ulysses.report(found)
    return {"rows": found}


def measure(args: argparse.Namespace) -> Result:
    if args.job == "ulysses":
        return measure_ulysses(args.ranks, args.repeats)
    job = Job(**json.loads(args.job))
    if args.model == "7b":
        return measure_large(job, args.repeats)
    return backends.measure(job, str(backends.model_folder(update.MODEL)), args.repeats)


# ---- the parent ------------------------------------------------------------------------------------------------------

def report(tables: dict[str, list[Job]], found: dict[str, Result], prefix: str) -> None:
    for title, jobs in tables.items():
        done = [(job, found[prefix + job.key]) for job in jobs if prefix + job.key in found]
        if not done:
            continue
        print(f"\n{title}\n{backends.HEAD}")
        for job, result in done:
            print(backends.row(job, result))
        rates = {job.key: result["tokens"] / min(result["update"]) for job, result in done if "update" in result}
        if jobs[0].ranks == 1 and jobs[0].key in rates:
            print("tokens/s in all, of one GPU's: "
                  + ", ".join(f"{name} {rate / rates[jobs[0].key]:.2f} x" for name, rate in rates.items()))


def main() -> None:
    arguments = backends.parser(__doc__, "rlrun-scaling.json")
    arguments.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 1) if CUDA else 2)
    arguments.add_argument("--model", choices=["1.4b", "7b"], default="1.4b")
    args = arguments.parse_args()
    if args.job:
        backends.in_rank(lambda: measure(args))
        return
    tables, prefix = scaled(args.ranks, args.model), f"{args.model}: "
    command = [__file__, "--repeats", str(args.repeats), "--model", args.model, "--ranks", str(args.ranks), "--job"]
    todo = [(prefix + job.key, job.seconds, partial(backends.launch, [*command, json.dumps(asdict(job))], job.ranks))
            for jobs in tables.values() for job in jobs]
    if args.model == "1.4b" and args.ranks > 1:
        todo.append((f"Ulysses, {args.ranks} ranks", 120 + 60 * args.ranks,
                     partial(backends.launch, [*command, "ulysses"], args.ranks)))
    found = backends.run_all([one for one in todo if args.only in one[0]], args.results, args.budget_seconds)
    report(tables, found, prefix)


if __name__ == "__main__":
    main()
