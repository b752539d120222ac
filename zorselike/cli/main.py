"""The command line's entry: picks the command, and says a user's mistake in one line.

A command is a dataclass of a module of its own, with a method `run`. What needs torch is imported when
it is used: `zorselike --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import tyro

from zorselike.cli.doctor import Doctor
from zorselike.cli.plan.command import PlanCommand
from zorselike.cli.profile import ProfileCommand
from zorselike.cli.show import Show
from zorselike.cli.simulate import Simulate
from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.runtime.processes.launcher import report_mistake

_USER_ERRORS = (ConfigError, PlanError, ClusterError, ProfileError)
_MAX_WARNINGS = 3
"""Of one kind."""
_INTERRUPTED = 130
"""The exit code of a shell's command that Ctrl-C ended."""
_PIPE_CLOSED = 141
"""The exit code of a command whose output nobody reads any more."""
COMMANDS: dict[str, type[Command]] = {
    "doctor": Doctor,
    "plan": PlanCommand,
    "profile": ProfileCommand,
    "show": Show,
    "simulate": Simulate,
}


class Command(Protocol):
    """What a command line asks for."""

    def run(self) -> None:
        """Does it and prints what there is to say; raises what a user can mend."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Does as the command line (`sys.argv` unless given) says; 2 after an error that the user can mend, 130
    after Ctrl-C, 141 where nobody reads on."""
    app = tyro.extras.SubcommandApp()
    for name, command_type in COMMANDS.items():
        app.command(name=name)(command_type)
    command: Command = app.cli(
        prog="zorselike",
        description="Training on mixed GPUs. Training itself is torchrun -m zorselike.train.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        with _plain_warnings():
            command.run()
        sys.stdout.flush()
    except _USER_ERRORS as error:
        report_mistake(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was written stays", file=sys.stderr, flush=True)
        return _INTERRUPTED
    except BrokenPipeError:
        # Who reads, such as `head`, has read enough. Python would flush once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return 0


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings inside are for people: a line each, without the place in the program, each once, and of many
    of one kind the first few."""
    told: dict[type[Warning], set[str]] = {}

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        own = told.setdefault(category, set())
        if str(message) not in own and len(own) < _MAX_WARNINGS:
            _warn(str(message))
        own.add(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
    for own in told.values():
        if len(own) > _MAX_WARNINGS:
            _warn(f"and {len(own) - _MAX_WARNINGS} more of this kind")


def _warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # Ranks conclude alike: the first one tells.
        print(f"warning: {text}", file=sys.stderr, flush=True)
