"""`zorselike checkpoint`: one command for each thing that is done with checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from zorselike.cli.checkpoint.look import Diff, Ls, Show, Verify
from zorselike.cli.checkpoint.transfer import Export, Import
from zorselike.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class CheckpointCommand:
    """Look at checkpoints, check them, compare them, and bring weights in and out."""

    command: Annotated[
        Annotated[Ls, tyro.conf.subcommand("ls")]
        | Annotated[Verify, tyro.conf.subcommand("verify")]
        | Annotated[Show, tyro.conf.subcommand("show")]
        | Annotated[Diff, tyro.conf.subcommand("diff")]
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Import, tyro.conf.subcommand("import")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int | None:
        try:
            return self.command.run()
        except OSError as error:  # Of what is written; what is read has errors of its own.
            if isinstance(error, BrokenPipeError):
                raise
            raise CheckpointError(f"{error.filename or 'checkpoint'}: {error.strerror}") from None
