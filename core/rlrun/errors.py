"""Exit codes of `rl-run`, and the errors that users can expect: a message and a hint, no traceback."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What `rl-run` returns to the shell."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PLUGIN = 3
    RESOURCES = 4
    INTERRUPTED = 130
    TERMINATED = 143


class RunError(Exception):
    """The run failed for a reason that its user can act on. `hint` says how."""

    code = ExitCode.FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(RunError, ValueError):
    """The command line or the configuration is wrong."""

    code = ExitCode.USAGE


class PluginError(RunError):
    """A listed plugin is missing, incompatible, broken, or in conflict with another."""

    code = ExitCode.PLUGIN


class ResourceError(RunError):
    """What the run asks for is not there: devices, memory, disk, a cluster."""

    code = ExitCode.RESOURCES


class RankError(RunError):
    """A rank failed, died or hung; the message holds its traceback or stacks. `cause` is the rank's own exception."""

    def __init__(self, message: str, hint: str | None = None, cause: Exception | None = None) -> None:
        super().__init__(message, hint)
        self.cause = cause


class Terminated(RunError):
    """SIGTERM arrived; the state was saved."""

    code = ExitCode.TERMINATED
