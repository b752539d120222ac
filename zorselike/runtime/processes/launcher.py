"""Reports a user's mistake once a node, and to torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from zorselike.errors import ConfigError
from zorselike.runtime.processes.identity import find_identity

_HEAD_START_S = 3.0


def report_mistake(error: Exception) -> None:
    """One line on standard error, which torchrun's own report then repeats."""
    if not _is_first_of_node():
        # Ranks fail alike: the first of the node says why, and torchrun ends the others meanwhile.
        time.sleep(_HEAD_START_S)
    message = f"error: {error}"
    print(message, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # In the format of torchrun's `ErrorHandler`, whose report is the last on the screen.
        extra = {"timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _is_first_of_node() -> bool:
    try:
        return find_identity().local_rank == 0
    except ConfigError:  # This may be the mistake.
        return True
