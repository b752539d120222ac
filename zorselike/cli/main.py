"""The command line's entry: picks the command, and says a user's mistake in one line.

A command is a dataclass of a module of its own, with a method `run`. What needs torch is imported when
it is used: `zorselike --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import tyro

from zorselike.cli.show import Show
from zorselike.plan.errors import ClusterError, ConfigError, PlanError, ProfileError

_USER_ERRORS = (ConfigError, PlanError, ClusterError, ProfileError)
COMMANDS: dict[str, type[Command]] = {"show": Show}


class Command(Protocol):
    """What a command line asks for."""

    def run(self) -> None:
        """Does it and prints what there is to say; raises what a user can mend."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Does as the command line (`sys.argv` unless given) says; 2 after an error that the user can mend."""
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
        command.run()
    except _USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0
