"""`torchrun --nproc-per-node N -m zorselike.train --config recipes/x.toml`"""

from __future__ import annotations

import sys

from zorselike.errors import USER_ERRORS, ConfigError, describe_missing_package
from zorselike.runtime.processes.launcher import report_mistake
from zorselike.text.files import open_closed_streams
from zorselike.train.config.checks import load_plan
from zorselike.train.config.file import parse_command_line

_STOPPED = 130


def main() -> int:
    """Trains as the command line says; returns 2 after an error that the user can correct, 130 after Ctrl-C
    before the first step."""
    open_closed_streams()
    try:
        request = parse_command_line()
        plan = load_plan(request.config)

        # Imported after the checks: torch takes seconds, which a misspelt key should not cost.
        if request.config.elastic.enable and not request.dry_run:
            from zorselike.train.elastic.program import run_elastic

            return run_elastic(request, plan)
        from zorselike.train.trainer import run

        return run(request, plan)
    except ModuleNotFoundError as error:
        report_mistake(ConfigError(describe_missing_package(error, "the training program")))
        return 2
    except USER_ERRORS as error:
        report_mistake(error)
        return 2
    except KeyboardInterrupt:
        print("stopped before the first step", file=sys.stderr)
        return _STOPPED


if __name__ == "__main__":
    sys.exit(main())
