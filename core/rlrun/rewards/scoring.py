"""What runs in a scoring process: made once, then called with samples. Imports nothing heavy."""

import asyncio
import ctypes
import importlib
import inspect
import math
import numbers
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlrun.environments.protocol import Answer, Turn
from rlrun.rewards.function import load_file
from rlrun.rewards.protocol import RewardItem, Score

_PR_SET_PDEATHSIG = 1


class RewardUnusableError(ValueError):
    """A reward could not be made."""


@dataclass(frozen=True)
class PartSpec:
    """One part of the weighted sum, and how to make it."""

    name: str
    path: str  # "package.module:Class"
    weight: float
    kwargs: Mapping[str, Any]


_parts: list[tuple[PartSpec, Any]] = []  # the rewards of the weighted sum, or the one environment
_failure: str | None = None


def start(parent: int, plugin_files: Sequence[tuple[str, str]], parts: Sequence[PartSpec]) -> None:
    """Prepare this process: bound to its parent's life, in a group of its own, with every part made.

    A failure is kept for `score` to report: a process that ends here would only be started again."""
    global _failure
    os.setsid()
    os.dup2(2, 1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    try:
        for name, path in plugin_files:
            load_file(name, path)
        for part in parts:
            module, _, attribute = part.path.partition(":")
            try:
                _parts.append((part, getattr(importlib.import_module(module), attribute)(**part.kwargs)))
            except Exception as error:
                raise RewardUnusableError(f"reward {part.name!r} ({part.path}, kwargs {dict(part.kwargs)}): "
                                          f"{type(error).__name__}: {error}") from error
    except Exception as error:  # noqa: BLE001
        _failure = f"{error}\n{traceback.format_exc()}"


def score(items: Sequence[RewardItem]) -> tuple[list[tuple[Score, str]], float]:
    """Each sample's score, with the traceback of its error; and the seconds it took.

    Raises RewardUnusableError where `start` failed."""
    if _failure is not None:
        raise RewardUnusableError(_failure)
    began = time.perf_counter()
    return [_step(item) if isinstance(item, Turn) else _score(item) for item in items], time.perf_counter() - began


def _score(item: RewardItem) -> tuple[Score, str]:
    total, first = 0.0, 0.0
    correct: float | None = None
    pred: str | None = None
    logged: dict[str, float] = {}
    for part, reward in _parts:
        try:
            outcome = _checked(reward(item))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return _failed(part, error)
        value = outcome.pop("score")
        total += part.weight * value
        first = first if logged else value
        said, right = outcome.pop("pred", None), outcome.pop("correct", None)
        pred, correct = said if pred is None else pred, right if correct is None else correct
        logged[part.name] = value
        logged |= {f"{part.name}/{name}": number for name, number in outcome.items()}
    return Score(total, first if correct is None else correct, logged, pred), ""


def _step(turn: Turn) -> tuple[Score, str]:
    [(part, environment)] = _parts
    try:
        state = _awaited(environment.reset(turn)) if turn.first else turn.state
        messages, reward, done = _awaited(environment.step(state, turn.messages))
        outcome = _checked(reward)
        if not done and not messages:
            raise ValueError("the environment goes on, but returned no message")
        if not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and m.get("role") for m in messages):
            raise TypeError(f"messages must have role and content, a text; the environment returned {messages!r}")
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return _failed(part, error)
    value = outcome.pop("score")
    correct, pred = outcome.pop("correct", value), outcome.pop("pred", None)
    numbers = {f"{part.name}/{name}": number for name, number in outcome.items()}
    return Answer(value, correct, numbers, pred, messages=[dict(m) for m in messages], done=bool(done), state=state), ""


def _awaited(result: Any) -> Any:
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _failed(part: PartSpec, error: BaseException) -> tuple[Score, str]:
    line = " ".join(f"{part.name}: {type(error).__name__}: {error}".split())
    return Score(0.0, 0.0, error=line), traceback.format_exc()


def _checked(returned: Any) -> dict[str, Any]:
    """What a reward returned as plain numbers. Raises ValueError or TypeError for what is no score."""
    outcome = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in outcome:
        raise ValueError(f"the reward returned no 'score', only {sorted(outcome)}")
    for name, value in outcome.items():
        if name == "pred":
            outcome[name] = None if value is None else str(value)
        elif not isinstance(value, numbers.Real):
            raise TypeError(f"the reward returned {name} = {value!r}, which is no number but {type(value).__name__}")
        elif name in ("score", "correct") and not math.isfinite(value):
            raise ValueError(f"the reward returned a {name} that is not finite: {value!r}")
        else:
            outcome[name] = float(value)
    return outcome
