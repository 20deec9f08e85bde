"""A calculator that the policy may use before it answers: an environment, as a plugin in one file.

`rl-run examples/calculator.yaml -p fsdp,examples/calculator.py` trains with it. Run by itself,
`python examples/calculator.py build/calculator`, this file writes what that needs: a tiny chat model, and sums with
demonstrations of how the calculator is used.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlrun.data.sample import Messages
from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl
from rlrun.rewards.protocol import RewardItem

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}
_LONGEST = 200
"""Characters of an expression. Without powers, that also bounds its numbers."""


class Calculator:
    """A reply with `<calc>EXPRESSION</calc>` gets the value as a message of role `tool`; one without is the answer.

    Reward 1 for an answer equal to the reference, as a text or a number, else 0. `tag` is the word in the brackets,
    `answer` the sample's column that holds the reference instead of its answer. Logs how many expressions were worked
    out (`calls`).
    """

    def __init__(self, tag: str = "calc", answer: str | None = None) -> None:
        self.pattern = re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL)
        self.answer = answer

    def reset(self, sample: RewardItem) -> dict[str, Any]:
        if self.answer is not None and self.answer not in sample.extra:
            raise ValueError(f"the sample has no column {self.answer!r}; it has {', '.join(sample.extra) or 'none'}")
        return {"answer": str(sample.answer if self.answer is None else sample.extra[self.answer]), "calls": 0}

    def step(self, state: dict[str, Any], messages: Messages) -> tuple[Messages, Mapping[str, Any], bool]:
        reply = messages[-1]["content"]
        if found := self.pattern.findall(reply):
            try:
                value = evaluate(found[-1])
                state["calls"] += 1
            except ValueError as error:
                value = f"error: {error}"
            return [{"role": "tool", "content": value}], {"score": 0.0}, False
        correct = float(equal(reply.strip(), state["answer"].strip()))
        return [], {"score": correct, "correct": correct, "calls": state["calls"], "pred": reply.strip()}, True


def evaluate(expression: str) -> str:
    """The value of + - * / // % and brackets over numbers. Raises ValueError for anything else."""
    if len(expression) > _LONGEST:
        raise ValueError("too long")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value) if isinstance(value, float) and value.is_integer() else value)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError("division by zero" if isinstance(error, ZeroDivisionError) else "not an expression") from error


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: int | float = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return result
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        signed: int | float = _OPERATORS[type(node.op)](_value(node.operand))
        return signed
    raise ValueError("only numbers and + - * / // % ( )")


def equal(text: str, reference: str) -> bool:
    """Whether two texts are the same, or the same number."""
    if text == reference:
        return True
    try:
        return float(text) == float(reference)
    except ValueError:
        return False


@hookimpl
def plugin_info() -> PluginInfo:
    return PluginInfo("calculator", API_VERSION, provides={"environment": {"calculator": "calculator:Calculator"}})


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
    """Write a tiny chat model, and sums to train on and to validate with."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--train", type=int, default=2000, help="rows to train on")
    parser.add_argument("--unseen", type=int, default=160, help="rows to validate with")
    args = parser.parse_args()

    from rlrun.models.folder import load_tokenizer
    from rlrun.testing.tiny import CHATML, save_tiny

    save_tiny(args.out / "model", words=MARKS, chat_template=CHATML, hidden_size=96, intermediate_size=288, num_hidden_layers=3)
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
