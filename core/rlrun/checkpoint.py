"""Checkpoints on disk: written under a temporary name, flushed, renamed. The name is the proof that one is complete."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrun.errors import ConfigError

NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: a folder for each role, `hf/`, and trainer.json."""

    path: Path
    step: int

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's state: stage, steps, sampler, algorithm."""
        return json.loads((self.path / "trainer.json").read_text())


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run folder. Folders of other names are the user's own and are never touched."""

    directory: Path
    keep: int | None

    def list(self) -> list[Checkpoint]:
        """Complete ones, by step."""
        found = [(NAME.fullmatch(p.name), p) for p in self.directory.glob("step_*") if p.is_dir()]
        return sorted((Checkpoint(p, int(m[1])) for m, p in found if m), key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        complete = self.list()
        return complete[-1] if complete else None

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """Where anything fails inside, the step's partial folder goes."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self._partial(step), ignore_errors=True)
            raise

    def _partial(self, step: int) -> Path:
        return self.directory / f".partial-step_{step:06d}"

    def begin(self, step: int, state: dict[str, Any]) -> Path:
        """A folder to fill, with the trainer's state as it is now."""
        self.remove_partial()
        partial = self._partial(step)
        partial.mkdir(parents=True)
        (partial / "trainer.json").write_text(json.dumps(state, indent=1))
        return partial

    def publish(self, step: int, needed: Collection[str] = ()) -> Checkpoint:
        """Give a filled folder its name, then remove what is over `keep`."""
        partial = self._partial(step)
        if (partial / "actor" / "hf").is_dir():
            (partial / "actor" / "hf").rename(partial / "hf")
        flush(partial)
        final = self.directory / f"step_{step:06d}"
        if final.exists():  # a resumed run that saves a step again: the new one takes its place whole
            shutil.rmtree(final)
        partial.rename(final)
        _flush_entry(self.directory)
        self._retain(needed)
        return Checkpoint(final, step)

    def remove_partial(self) -> None:
        """Remove what an earlier, killed run left half-written."""
        for path in self.directory.glob(".partial-step_[0-9]*"):
            shutil.rmtree(path)

    def _retain(self, needed: Collection[str]) -> None:
        for old in self.list()[: -self.keep] if self.keep else ():
            if old.path.name not in needed:
                shutil.rmtree(old.path)


def find(path: str) -> Checkpoint:
    """The checkpoint at a path that the user named. Raises ValueError where there is none."""
    folder = Path(path)
    match = NAME.fullmatch(folder.resolve().name)
    if not match or not (folder / "trainer.json").is_file():
        raise ValueError(f"{path} is not a checkpoint: name a folder runs/NAME/checkpoints/step_NNNNNN")
    return Checkpoint(folder, int(match[1]))


def export(checkpoint: Path, out: Path) -> None:
    """Copy a checkpoint's Hugging Face folder to `out`. Raises ConfigError where it holds none, or `out` exists."""
    source = checkpoint / "hf"
    if not checkpoint.is_dir():
        raise ConfigError(f"there is no checkpoint {str(checkpoint)!r}", "they lie in RUN/checkpoints/step_NNNNNN")
    if not source.is_dir():
        raise ConfigError(f"{checkpoint} holds no Hugging Face weights: add hf_model to checkpoint.save_contents")
    if out.exists():
        raise ConfigError(f"{out} exists: name a folder that does not")
    shutil.copytree(source, out)


def flush(folder: Path) -> None:
    """Have the disk keep a folder and all in it."""
    for path in folder.rglob("*"):
        _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
