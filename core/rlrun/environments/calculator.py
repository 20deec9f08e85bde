"""A calculator that the policy may use before it answers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlrun.data.sample import Messages
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
