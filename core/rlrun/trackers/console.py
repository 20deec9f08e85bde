"""What a person sees of a run, on stderr: a live line on a terminal, else one plain line a step."""

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SHOWN = (
    ("loss", ("actor/pg_loss", "sft/loss", "actor/loss"), "{:.4f}"),
    ("reward", ("critic/score/mean",), "{:.3f}"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), "{:.4f}"),
    ("tokens", ("response_length/mean",), "{:.0f}"),
    ("tok/s", ("perf/throughput",), "{:,.0f}"),
    ("mem", ("perf/max_memory_allocated_gb",), "{:.1f} GB"),
)


class Console:
    """Progress for people. A validation gets a line of its own."""

    def __init__(self, run_dir: Path, total_steps: int, resumed_step: int) -> None:
        self.total = total_steps
        terminal = Terminal(stderr=True)
        self.live: Progress | None = None
        if terminal.is_terminal:
            self.live = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                TextColumn("{task.fields[phase]}"), TimeElapsedColumn(), TimeRemainingColumn(), console=terminal,
                redirect_stdout=False)
            self.task = self.live.add_task("", total=total_steps or None, completed=resumed_step, phase="")
            self.live.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        validation = {name[len("val-core/"):]: value for name, value in metrics.items() if name.startswith("val-core/")}
        if validation:
            self._line(f"step {step}  validation  " + "  ".join(f"{n} {v:.3f}" for n, v in validation.items()))
        text = summary(metrics)
        if self.live is not None:
            self.live.update(self.task, completed=step, description=text)
        elif text:
            self._line(f"step {step}{f'/{self.total}' if self.total else ''}  {text}")

    def phase(self, name: str) -> None:
        """Show what the run does now; only on a terminal."""
        if self.live is not None:
            self.live.update(self.task, phase=f"[dim]{name}")

    def _line(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.update(self.task, phase="")
            self.live.stop()


def summary(metrics: Mapping[str, float]) -> str:
    """The few numbers that a step's line shows, in fixed order: loss, reward, kl, tokens, tok/s, mem."""
    parts = []
    for label, names, form in _SHOWN:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            parts.append(f"{label} {form.format(metrics[name])}")
    return "  ".join(parts)
