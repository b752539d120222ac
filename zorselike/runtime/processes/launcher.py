"""Reports a user's mistake once a node, and to torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from zorselike.errors import ConfigError
from zorselike.runtime.processes.identity import find_identity

_HEAD_START_S = 3.0

T = TypeVar("T")


def report_mistake(error: Exception) -> None:
    """One line on standard error, which torchrun's own report then repeats."""
    if not is_first_of_node():
        # Ranks fail alike: the first of the node says why, and torchrun ends the others meanwhile.
        with suppress(KeyboardInterrupt):
            time.sleep(_HEAD_START_S)
    message = f"error: {error}"
    print(message, file=sys.stderr, flush=True)
    _tell_torchrun(message)


def parse_once(parse: Callable[[bool], T]) -> T:
    """What `parse(prints)` makes of the command line, with `prints` on the first process of a node alone.

    Ranks have the same command line: the others end without a word where it is wrong or asks for help.
    """
    is_first = is_first_of_node()
    try:
        return parse(is_first)
    except SystemExit as end:
        if end.code and is_first:
            _tell_torchrun("error: the command line is wrong; what is wrong with it stands above")
        elif end.code:
            time.sleep(_HEAD_START_S)
        raise


def is_first_of_node() -> bool:
    """Whether this process speaks for its node in what all ranks would say alike."""
    try:
        return find_identity().local_rank == 0
    except ConfigError:  # This may be the mistake.
        return True


def _tell_torchrun(message: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # In the format of torchrun's `ErrorHandler`, whose report is the last on the screen.
        extra = {"timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
