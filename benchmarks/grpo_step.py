"""A whole step with vLLM colocated on one GPU: GRPO against its floor and against TRL, PRIME against RLOO, on one machine.

The work: a random Qwen2-shaped model of 1.4B parameters, 64 prompts of about 114 tokens, 8 samples each, 512 new tokens. The
floor is the engine alone (no log-probabilities, no text) and the compiled update alone (benchmarks/update.py). Every part runs
in a process of its own and its result is kept: called again, the script goes on with the parts that are missing. Without a GPU
a tiny model shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import update

from rlrun.trackers.jsonl import read

CUDA = torch.cuda.is_available()
PROMPTS, SAMPLES, NEW = (64, 8, 512) if CUDA else (4, 2, 8)
LENGTHS = (104, 124) if CUDA else (10, 14)
MEMORY = 0.6
FOLDER = Path(tempfile.gettempdir(), "rlrun-grpo-step")
MODEL = FOLDER / "model"


def prompts(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choices("abcdefghij klmnopqrstuv", k=dice.randint(*LENGTHS))) for _ in range(count)]


def engine() -> dict[str, Any]:
    """Seconds of generation alone: the same engine settings, nothing asked for but tokens."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    llm = LLM(model=str(MODEL), dtype="bfloat16" if CUDA else "float32", gpu_memory_utilization=MEMORY, enforce_eager=not CUDA,
              max_model_len=LENGTHS[1] + NEW, disable_log_stats=True, skip_tokenizer_init=True)
    params = SamplingParams(n=SAMPLES, max_tokens=NEW, ignore_eos=True, detokenize=False)
    seconds = []
    for repeat in range(5):
        batch = [{"prompt_token_ids": tokenizer(text).input_ids} for text in prompts(repeat, PROMPTS)]
        began = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[1:]}


def floor_update() -> dict[str, Any]:
    """Seconds of forward, backward and AdamW alone, each decoder layer compiled."""
    batch, tokens = update.make_batch("short"), update.WORK["short"][3]
    longest = 1 << (int(batch.lengths.max()) - 1).bit_length()
    floor = update.Floor(str(MODEL))
    rows = floor.rows(batch, tokens)
    floor.update(rows[:2], longest)
    seconds = []
    for _ in range(4):
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        floor.update(rows, longest)
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


REWARD = "def letters(item):\n    return min(1.0, item.completion.count('a') / 20)\n"


PRIME = {"reference": "policy", "accuracy_range": [0.0, 1.0], "drop_truncated": False}
"""Every group is kept, as none of a random model's would be: the work of a step is then that of RLOO's and the reward model's."""


def prepare() -> None:
    """The model's folder, from a process that lets go of the GPU."""
    FOLDER.mkdir(exist_ok=True)
    if not (MODEL / "config.json").exists():
        code = f"import update; update.save_model({str(MODEL)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


def settings(name: str, steps: int, algorithm: str = "grpo") -> dict[str, Any]:
    """The configuration of a run with the defaults, the gap metric on."""
    (FOLDER / "reward.py").write_text(REWARD)
    (FOLDER / "train.jsonl").write_text("".join(
        json.dumps({"prompt": text, "answer": ""}) + "\n" for text in prompts(0, PROMPTS * 64)))
    return {
        "plugins": ["fsdp"], "run": {"name": name, "dir": str(FOLDER)},
        "model": {"path": str(MODEL), "dtype": "bfloat16" if CUDA else "float32"},
        "data": {"train": [{"kind": "jsonl", "path": str(FOLDER / "train.jsonl")}], "max_prompt_tokens": 128},
        "rollout": {"engine": "vllm", "samples_per_prompt": SAMPLES, "max_new_tokens": NEW,
                    "engine_args": {"gpu_memory_utilization": MEMORY} if CUDA else {}},
        "reward": {"kind": "function", "kwargs": {"path": f"{FOLDER}/reward.py:letters"}},
        "stages": [{"algorithm": {"name": algorithm, "prompts_per_step": PROMPTS}, "steps": steps}],
        "actor": {"optim": {"lr": 1e-6}, "tokens_per_micro_batch": update.WORK["short"][3] if CUDA else 1024},
        "checkpoint": {"save_contents": ["model"], "load_contents": ["model"]},
        "resources": {"launcher": "local"}, "trainer": {"trackers": ["console"]},
    }


def arranged(name: str, backend: str, train: int, rollout: int, steps: int) -> dict[str, Any]:
    """The same work over ranks that train, with engines beside them or on ranks of their own."""
    config = settings(f"{name}-{int(time.time())}", steps)
    config["plugins"], config["actor"]["backend"] = [backend], backend
    config["resources"] = {"launcher": "ray" if train + rollout > 1 else "local", "train_ranks": train, "rollout_ranks": rollout}
    return config


def ours(steps: int, algorithm: str) -> dict[str, Any]:
    config = settings(f"{algorithm}-{int(time.time())}", steps, algorithm)
    return train(config | ({"plugins": ["fsdp", "prime"], "prime": PRIME} if algorithm == "prime" else {}))


def train(config: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
    """Seconds of each phase and metrics of each step of `rl-run`, which has a limit of `seconds`."""
    name = config["run"]["name"]
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "rlrun", str(path)], check=True, stdout=sys.stderr, timeout=seconds)
    rows = [row for row in read(FOLDER / name / "metrics.jsonl") if "timing_s/step" in row]
    timings = [{k.removeprefix("timing_s/"): v for k, v in row.items() if k.startswith("timing_s/")} for row in rows]
    keep = ("rollout/gap_mean", "rollout/gap_max", "perf/max_memory_reserved_gb", "perf/max_memory_allocated_gb",
            "perf/device_memory_used_gb", "response_length/mean", "perf/total_num_tokens")
    return {"timings": timings, "metrics": [{k: row[k] for k in keep if k in row} for row in rows]}


def trl() -> dict[str, Any]:
    """Steps of TRL's GRPOTrainer at the fastest settings that its documentation gives for one GPU."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    def letters(completions: list[str], **_: Any) -> list[float]:
        return [min(1.0, text.count("a") / 20) for text in completions]

    micro = 32 if CUDA else 4
    args = GRPOConfig(
        output_dir=str(FOLDER / "trl"), use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=CUDA,
        vllm_gpu_memory_utilization=MEMORY, vllm_max_model_length=LENGTHS[1] + NEW,
        vllm_importance_sampling_correction=False, num_generations=SAMPLES, max_completion_length=NEW, temperature=1.0,
        per_device_train_batch_size=micro, gradient_accumulation_steps=PROMPTS * SAMPLES // micro, num_iterations=1, beta=0.0,
        learning_rate=1e-6, bf16=CUDA, gradient_checkpointing=False, max_steps=4, report_to=[], save_strategy="no",
        logging_steps=1, model_init_kwargs={"dtype": "float32"}, optim="adamw_torch_fused",
    )
    rows = Dataset(InMemoryTable.from_pydict({"prompt": prompts(0, PROMPTS * 8)}), fingerprint="prompts")
    trainer = GRPOTrainer(model=str(MODEL), reward_funcs=letters, args=args, train_dataset=rows)
    trainer.train()
    return {"seconds": [row["step_time"] for row in trainer.state.log_history if "step_time" in row][1:]}


PARTS = {
    "engine": (engine, 150), "update": (floor_update, 90), "trl": (trl, 240),
    "ours": (lambda: ours(20 if CUDA else 3, "grpo"), 330), "rloo": (lambda: ours(8 if CUDA else 3, "rloo"), 180),
    "prime": (lambda: ours(8 if CUDA else 3, "prime"), 240),
}
"""And seconds that each needs."""


def split(part: dict[str, Any]) -> dict[str, float]:
    """Median seconds of each phase, without the first steps, which compile."""
    rows = part["timings"][2:] or part["timings"]
    return {k: statistics.median(row[k] for row in rows if k in row) for k in rows[-1]}


def report(found: dict[str, Any]) -> None:
    def middle(name: str) -> float:
        return statistics.median(found[name]["seconds"])

    for name in ("engine", "update", "trl"):
        if name in found:
            print(f"{name}: " + ", ".join(f"{s:.2f}" for s in found[name]["seconds"]) + f" s, median {middle(name):.2f}")
    steps = {}
    for name in ("ours", "rloo", "prime"):
        if name in found:
            phases, metrics = split(found[name]), found[name]["metrics"]
            steps[name] = phases["step"]
            print(f"{name}: median seconds of each phase: " + ", ".join(f"{k} {v:.3f}" for k, v in phases.items()))
            print(f"{name}: all steps: " + ", ".join(f"{row['step']:.2f}" for row in found[name]["timings"]))
            print(f"{name}: metrics of steps 3 and last: {metrics[2]} {metrics[-1]}")
    if {"ours", "engine", "update"} <= found.keys():
        floor = middle("engine") + middle("update")
        print(f"step {steps['ours']:.2f} s = {steps['ours'] / floor:.3f} x floor ({floor:.2f} s)")
    if {"ours", "trl"} <= found.keys():
        print(f"step = {steps['ours'] / middle('trl'):.3f} x TRL's")
    if {"rloo", "prime"} <= found.keys():
        more, update = steps["prime"] - steps["rloo"], split(found["rloo"])["update_actor"]
        print(f"PRIME's step {steps['prime']:.2f} s, RLOO's {steps['rloo']:.2f}: {more / steps['rloo']:.1%} of RLOO's step more, "
              f"{more / update:.2f} x its update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="start no part that may not end in this time")
    parser.add_argument("--part", choices=PARTS, help="run this part here, and print its result")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to run; default: all")
    parser.add_argument("--results", type=Path, default=FOLDER / "results.json")
    args = parser.parse_args()
    began = time.monotonic()
    if args.part:
        result = PARTS[args.part][0]()
        Path(os.environ["RESULT"]).write_text(json.dumps(result))
        return
    prepare()
    found = json.loads(args.results.read_text()) if args.results.exists() else {}
    for name in args.only or PARTS:
        if name in found or time.monotonic() - began + PARTS[name][1] * (CUDA or 0.2) > args.budget_seconds:
            continue
        out = FOLDER / f"{name}.json"
        done = subprocess.run([sys.executable, __file__, "--part", name], env={**os.environ, "RESULT": str(out)})
        if done.returncode:
            print(f"{name}: failed with code {done.returncode}")
            continue
        found[name] = json.loads(out.read_text())
        args.results.write_text(json.dumps(found))
        report(found)
    report(found)


if __name__ == "__main__":
    main()
