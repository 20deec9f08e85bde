"""Writes what calculator.yaml needs: a tiny chat model, and sums with demonstrations of how the calculator is used.

`python examples/calculator.py build/calculator`
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from rlrun.environments.calculator import evaluate
from rlrun.testing.tiny import CHATML, save_tiny

MARKS = ["<calc>", "</calc>", "<|user|>", "<|assistant|>", "<|tool|>"]


def demonstration(tokenizer: Any, question: str, expression: str, result: str) -> str:
    """All that follows a question where the policy asks the calculator and repeats what it says, but for the last token."""
    asked = [{"role": "user", "content": question}]
    said = [{"role": "assistant", "content": f"<calc>{expression}</calc>"}, {"role": "tool", "content": result},
            {"role": "assistant", "content": result}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    whole: str = tokenizer.apply_chat_template([*asked, *said], tokenize=False)
    return whole.removeprefix(prompt).removesuffix(tokenizer.eos_token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--train", type=int, default=2000, help="rows to train on")
    parser.add_argument("--unseen", type=int, default=160, help="rows to validate with")
    args = parser.parse_args()

    from rlrun.models.loading import load_tokenizer

    save_tiny(args.out / "model", words=MARKS, chat_template=CHATML, hidden_size=96, intermediate_size=288,
              num_hidden_layers=3)
    tokenizer = load_tokenizer(str(args.out / "model"))
    sums = [f"{a}{sign}{b}" for a in range(2, 10) for b in range(10, 100) for sign in "+-*"]
    random.Random(0).shuffle(sums)
    parts = {"train": sums[args.unseen : args.unseen + args.train], "unseen": sums[: args.unseen]}
    for name, chosen in parts.items():
        with (args.out / f"{name}.jsonl").open("w") as file:
            for one in chosen:
                result = evaluate(one)
                answer = demonstration(tokenizer, f"{one}=", one, result)
                file.write(json.dumps({"prompt": f"{one}=", "answer": answer, "result": result}) + "\n")


if __name__ == "__main__":
    main()
