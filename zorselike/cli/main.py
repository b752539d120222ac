"""Entry of the command line: runs a command and reports a user's mistake in one line.

A command is a dataclass with a method `run`, in its own module. Modules that need torch are imported when
used, so that `zorselike --help` starts fast.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Protocol

import tyro

from zorselike.cli.checkpoint.command import CheckpointCommand
from zorselike.cli.doctor import Doctor
from zorselike.cli.job.run import Join, Run
from zorselike.cli.job.status import Leave, Status
from zorselike.cli.launch.command import LaunchCommand
from zorselike.cli.plan.command import PlanCommand
from zorselike.cli.profile import ProfileCommand
from zorselike.cli.replay import Replay
from zorselike.cli.show import Show
from zorselike.cli.simulate import Simulate
from zorselike.errors import USER_ERRORS, ConfigError
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.launcher import is_first_of_node, parse_once, report_mistake
from zorselike.text.files import open_closed_streams
from zorselike.version import __version__

_MAX_WARNINGS = 3
"""How many warnings of one category are printed."""
_INTERRUPTED = 130
"""Exit code of a shell command ended by Ctrl-C."""
_INPUTS = ("--cluster", "--profile", "--from-profile", "--workload", "--hf")
"""Files that are read, of which a user who names two means both."""
_PIPE_CLOSED = 141
"""Exit code of a command whose output is no longer read."""
COMMANDS: dict[str, type[Command]] = {
    "checkpoint": CheckpointCommand,
    "doctor": Doctor,
    "launch": LaunchCommand,
    "join": Join,
    "leave": Leave,
    "plan": PlanCommand,
    "profile": ProfileCommand,
    "replay": Replay,
    "run": Run,
    "show": Show,
    "simulate": Simulate,
    "status": Status,
}


class Command(Protocol):
    """A parsed command line."""

    def run(self) -> int | None:
        """Runs the command and prints its result; raises errors that a user can correct. Returns an exit code
        where it is not 0."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (by default `sys.argv`); returns 2 after an error that the user can correct, 130
    after Ctrl-C, 141 if the output is no longer read."""
    open_closed_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; Python would flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        if is_first_of_node():
            print(f"zorselike {__version__}")
        return 0
    app = tyro.extras.SubcommandApp()
    for name, command_type in COMMANDS.items():
        app.command(name=name)(command_type)
    command: Command = parse_once(
        lambda prints: app.cli(
            prog="zorselike",
            description="Training on mixed GPUs; `--version` says which version this is. Training itself is "
            "torchrun -m zorselike.train.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            console_outputs=prints,
        )
    )
    try:
        _refuse_two_inputs(arguments)
        with _plain_warnings():
            code = command.run()
    except USER_ERRORS as error:
        report_mistake(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted; files already written are kept", file=sys.stderr, flush=True)
        return _INTERRUPTED
    return code or 0


def _refuse_two_inputs(arguments: Sequence[str]) -> None:
    """Raises `ConfigError`; of two files the parser takes the last, without a word."""
    own = [
        word.partition("=")[0].replace("_", "-") for word in takewhile(lambda word: word != "--", arguments)
    ]
    for flag in _INPUTS:
        if own.count(flag) > 1:
            hint = ", or measure into one file with `zorselike profile -o`" if "profile" in flag else ""
            raise ConfigError(f"{own[0]}: {flag} is given twice; keep one{hint}")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Prints each different warning once, in one line without its place in the program, only the first few
    of a category."""
    seen: dict[type[Warning], set[str]] = {}

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        texts = seen.setdefault(category, set())
        if str(message) not in texts and len(texts) < _MAX_WARNINGS:
            _warn(str(message))
        texts.add(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
    for texts in seen.values():
        if len(texts) > _MAX_WARNINGS:
            _warn(f"and {len(texts) - _MAX_WARNINGS} more of this kind")


def _warn(text: str) -> None:
    if find_identity().rank == 0:  # Ranks warn alike.
        print(f"warning: {text}", file=sys.stderr, flush=True)
