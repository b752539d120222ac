"""`torchrun --nproc-per-node N -m zorselike.train --config recipes/x.toml`"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from zorselike.plan.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.train.config import load_plan
from zorselike.train.config_file import parse_command_line

_USER_ERRORS = (ConfigError, PlanError, ClusterError, ProfileError)
_HEAD_START_S = 3.0


def main() -> int:
    """Trains as the command line says; 2 after an error that the user can mend."""
    try:
        request = parse_command_line()
        plan = load_plan(request.config)

        # Only now: torch takes seconds, which a misspelt key should not cost.
        from zorselike.train.trainer import run

        return run(request, plan)
    except _USER_ERRORS as error:
        if int(os.environ.get("LOCAL_RANK", 0)) != 0:
            # Ranks fail alike: the first of the node says why, and torchrun ends the others meanwhile.
            time.sleep(_HEAD_START_S)
        print(f"error: {error}", file=sys.stderr, flush=True)
        _tell_torchrun(f"error: {error}")
        return 2


def _tell_torchrun(message: str) -> None:
    """Lets torchrun's report, the last on the screen, say why; in `ErrorHandler`'s format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


if __name__ == "__main__":
    sys.exit(main())
