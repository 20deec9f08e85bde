"""`rl-run report`: one page of HTML for one or more runs, with all that it needs inside it."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlrun.errors import ConfigError
from rlrun.folder import flat
from rlrun.trackers.jsonl import read

TEMPLATE = Path(__file__).parent / "templates" / "report.html"
POINTS = 2000
"""Steps of a run that the page has at the most: of a longer one every second, third, ... and its last."""
DUMPS, SAMPLES = 6, 12
"""Dumps of rollouts whose lengths and rewards the page has, evenly chosen; and records of each that can be read there."""
READ = ("prompt", "completion", "answer", "reward", "correct", "error", "tokens", "finish_reason", "turns", "texts", "advantages")


def write(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page to `out` (default: report.html in the first run's folder). Returns its path.

    A run may be in progress, or not have made a step. Raises ConfigError for a folder that holds no run."""
    for run in runs:
        if not (run / "config.yaml").exists() and not (run / "metrics.jsonl").exists():
            raise ConfigError(f"{run} holds no run: neither config.yaml nor metrics.jsonl", "give the folder of a run: runs/NAME")
    out = out or runs[0] / "report.html"
    text = json.dumps(data(runs), allow_nan=False, separators=(",", ":"))
    # Nothing in a rollout may end the script element, or begin another one.
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    out.write_text(TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text), encoding="utf-8")
    return out


def data(runs: Sequence[Path]) -> dict[str, Any]:
    """All that the page shows, JSON-able."""
    configs = [_config(run) for run in runs]
    keys = sorted(set().union(*configs))
    differing = {key: [config.get(key) for config in configs] for key in keys
                 if any(config.get(key) != configs[0].get(key) for config in configs)}
    return {"runs": [{"name": name, **metrics(run), "dumps": dumps(run)} for name, run in zip(_names(runs), runs, strict=True)],
            "differing": differing}


def metrics(run: Path) -> dict[str, Any]:
    """`steps`, and for each metric one value or None for each of them: what metrics.jsonl last said of the step."""
    rows: dict[int, dict[str, float | None]] = {}
    for line in read(run / "metrics.jsonl"):
        rows.setdefault(line.pop("step"), {}).update(line)
    steps = sorted(rows)
    steps = [*steps[:-1 : -(-len(steps) // POINTS)], *steps[-1:]] if steps else []
    names = sorted({name for step in steps for name in rows[step]})
    return {"steps": steps, "metrics": {name: [rows[step].get(name) for step in steps] for name in names}}


def dumps(run: Path) -> list[dict[str, Any]]:
    """Of some dumps of rollouts: `step`, `kind` (step or validation), all `lengths` and `rewards`, and some records."""
    found = []
    for kind in ("step", "validation"):
        paths = sorted((run / "rollouts").glob(f"{kind}_*.jsonl"), key=_step)
        chosen = sorted({round(i * (len(paths) - 1) / (DUMPS - 1)) for i in range(DUMPS)}) if paths else []
        for path in (paths[i] for i in chosen):
            records = list(read(path))
            found.append({
                "step": _step(path), "kind": kind,
                "lengths": [r["tokens"] for r in records], "rewards": [r["reward"] for r in records],
                "records": [{key: r[key] for key in READ if r.get(key) is not None} for r in records[:SAMPLES]]})
    return found


def _step(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _config(run: Path) -> Mapping[str, Any]:
    """Keys of the run's configuration in full, with what each is; and the version of each plugin."""
    path, plugins = run / "config.yaml", run / "plugins.json"
    config = flat(yaml.safe_load(path.read_text(encoding="utf-8")), "") if path.exists() else {}
    versions = json.loads(plugins.read_text()) if plugins.exists() else []
    values = {**config, **{f"version of {one['name']}": one["version"] for one in versions}}
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}


def _names(runs: Sequence[Path]) -> list[str]:
    """The folders' names; their whole paths where two are the same."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]
