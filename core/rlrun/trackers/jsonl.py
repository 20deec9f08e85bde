"""metrics.jsonl: one JSON object a line, with its `step`."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Jsonl:
    """Appends to RUN/metrics.jsonl, a line a call, at once, whole or not at all. What is not finite becomes null."""

    def __init__(self, run_dir: Path, total_steps: int = 0, resumed_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.file = (run_dir / "metrics.jsonl").open("ab", buffering=0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = (json.dumps({"step": step, **finite}, ensure_ascii=False) + "\n").encode()
        start = self.file.seek(0, os.SEEK_END)
        try:
            while line:  # a disk that fills up takes a part first
                line = line[self.file.write(line):]
        except OSError:
            self.file.truncate(start)
            raise

    def close(self) -> None:
        self.file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, if there is one, without a last line that is still being written. What is not finite
    becomes None."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield json.loads(line, parse_constant=lambda _: None)


def replay(path: Path, log: Callable[[dict[str, float], int], None]) -> None:
    """Tell `log` all that a metrics.jsonl says, but what was not finite."""
    for row in read(path):
        log({name: value for name, value in row.items() if name != "step" and value is not None}, row["step"])


def cut_back(path: Path, step: int) -> int:
    """Leave out what a JSON-lines file says of steps after `step`, and a last line that was not finished.

    Returns the number of lines that stay; 0 for no file. The file is replaced in one move. Raises ValueError for any
    other line that is no JSON."""
    if not path.exists():
        return 0
    kept = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            keep = json.loads(line)["step"] <= step
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: no JSON ({error})") from error
            keep = False
        if keep and line.endswith(b"\n"):
            kept.append(line)
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return len(kept)
