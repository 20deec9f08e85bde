"""The command line: `rl-run CONFIG [key=value ...]`, `rl-run plugins`, `rl-run export`. Only data goes to stdout."""

import json
import logging
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlrun import __version__
from rlrun.errors import ConfigError, ExitCode, RunError

COMMANDS = ("run", "plugins", "export", "report", "doctor", "new-plugin")


class _RunByDefault(TyperGroup):
    """`rl-run CONFIG` means `rl-run run CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*COMMANDS, "--help", "--version", "--install-completion", "--show-completion"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(name="rl-run", cls=_RunByDefault, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)

PluginOption = Annotated[list[str] | None, typer.Option(
    "-p", "--plugins", metavar="NAME|FILE[,...]", help="Add plugins to the configuration's list.")]
Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="[key=value ...]", help="Keys to set, such as actor.optim.lr=1e-6 or stages.0.steps=10.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of expected errors too.")]


def main() -> None:
    """Entry point of the `rl-run` command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        _emit(f"rlrun {__version__}")
        raise typer.Exit()


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Reinforcement-learning post-training of language models.

    Train with: rl-run CONFIG [key=value ...] [-p PLUGIN]; rl-run run --help has all of its options.

    \b
    rl-run doctor                                     what is installed here
    rl-run examples/quickstart.yaml -p fsdp           train; the same command goes on where it stopped
    rl-run config.yaml -p fsdp actor.optim.lr=1e-6    with a key set, of those that --print-config shows
    rl-run report runs/first runs/second              look at two runs together
    rl-run new-plugin short-answers --kind reward     begin a plugin
    """


@app.command()
def run(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    overrides: Overrides = None,
    plugins: PluginOption = None,
    no_plugin: Annotated[list[str] | None, typer.Option(
        "--no-plugin", metavar="NAME", help="Leave out a listed plugin, with its section.")] = None,
    resume: Annotated[str, typer.Option(
        metavar="auto|never|PATH", help="From the run's newest checkpoint, anew, or from this one.")] = "auto",
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all keys and exit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all but the models, print the plan, exit.")] = False,
    debug: Debug = False,
) -> None:
    """Train as CONFIG says."""
    with _reported(debug):
        from rlrun.config.load import load_config, to_yaml

        if not Path(config).exists():
            close = get_close_matches(config, COMMANDS, 1)
            hint = f"did you mean rl-run {close[0]}?" if close else f"sub-commands are: {', '.join(COMMANDS)}"
            raise ConfigError(f"there is no configuration file {config!r}", hint)
        if resume not in ("auto", "never") and not Path(resume).exists():
            raise ConfigError(f"--resume {resume}: no such checkpoint", "auto, never, or a checkpoint's folder")
        checked, loaded = load_config(config, overrides or (), _items(plugins), _items(no_plugin))
        if print_config:
            _emit(to_yaml(checked).rstrip())
            return
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        logging.getLogger("rlrun").setLevel(logging.INFO)
        if dry_run:
            from rlrun import plan

            _emit(plan.dry_run(checked, loaded))
            return
        from rlrun import launch

        code = launch.run(checked, loaded, resume)
    raise typer.Exit(code)


@app.command("plugins")
def list_plugins(
    plugins: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    inspect: Annotated[bool, typer.Option("--inspect", help="Import installed plugins too.")] = False,
    debug: Debug = False,
) -> None:
    """List plugins: built-in, given with -p, and installed ones."""
    with _reported(debug):
        from rlrun.plugins import Plugins, discover

        rows = discover(Plugins.load(_items(plugins)), load=inspect)
        _emit(json.dumps(rows, indent=2) if as_json else "\n".join(_described(row) for row in rows))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to create.")],
    debug: Debug = False,
) -> None:
    """Copy a checkpoint's model in the form that transformers and vLLM load."""
    with _reported(debug):
        from rlrun.checkpoint import export as export_checkpoint

        export_checkpoint(checkpoint, out)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN...]", help="Folders of runs, also of one in progress.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: report.html in the first run.")] = None,
    debug: Debug = False,
) -> None:
    """Write one page of HTML with curves, timing, samples and differences of runs.

    Example: rl-run report runs/first runs/second --out compared.html"""
    with _reported(debug):
        from rlrun.report import write

        _emit(str(write(runs, out)))


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="YAML file of a run, to see what it lacks.")] = None,
    overrides: Overrides = None,
    plugins: PluginOption = None,
    debug: Debug = False,
) -> None:
    """Show versions, GPUs and plugins, and what a configuration needs and does not find; then the exit code is 4.

    Example: rl-run doctor examples/quickstart.yaml -p fsdp"""
    with _reported(debug):
        from rlrun.doctor import examine

        code = examine(config, overrides or (), _items(plugins))
    raise typer.Exit(code)


@app.command("new-plugin")
def new_plugin(
    name: Annotated[str, typer.Argument(
        help="Lower-case, such as short-answers; the plugin and its section are then short_answers.")],
    kind: Annotated[str, typer.Option("--kind", help="algorithm, backend, reward, rollout or tracker.")],
    debug: Debug = False,
) -> None:
    """Write a plugin to begin with, with its tests, into the folder rlrun-NAME.

    Example: rl-run new-plugin short-answers --kind reward"""
    with _reported(debug):
        from rlrun import scaffold

        folder = scaffold.new_plugin(name, kind, Path())
        _emit(f"{folder}: next, cd {folder}, pip install -e '.[test]', pytest; its README.md says more")


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Expected errors become a message, a hint and their exit code; all others keep their traceback and give 1."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a further one must not change how this ends
        print("rl-run: interrupted", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except RunError as error:
        if debug:
            traceback.print_exc()
        lines = [f"rl-run: {error}", *getattr(error, "__notes__", ())]
        print("\n".join([*lines, f"hint: {error.hint}"] if error.hint else lines), file=sys.stderr)
        raise typer.Exit(error.code) from error


def _items(given: list[str] | None) -> list[str]:
    return [item for group in given or () for item in group.split(",") if item]


def _emit(text: str) -> None:
    """Print data; a closed pipe shows here, where it is handled, and not at exit."""
    print(text, flush=True)


def _described(row: dict[str, Any]) -> str:
    where = row.get("path") or f"{row['dist']} {row['version']}"
    lines = [f"{row['name']:<14} {row['state']:<13} {where}"]
    if row.get("problem"):
        lines.append(f"    {row['problem']}")
    if row.get("hooks"):
        lines.append(f"    hooks: {', '.join(row['hooks'])}")
    lines += [f"    {kind}: {', '.join(names)}" for kind, names in row.get("provides", {}).items()]
    return "\n".join(lines)
